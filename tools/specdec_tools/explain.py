"""spec-decode explain: what happened in each step of a completion."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from specdec_core.cli.options import TRY, ModelCommand, ModelOptions, model_options, read_prompts, sampling_options
from specdec_core.cli.screen import make_console
from specdec_core.config.sampling import SamplingParams
from specdec_core.errors import SpecdecError
from specdec_tools.explain_html import html_of
from specdec_tools.explain_text import print_explanation
from specdec_tools.explained import explain
from specdec_tools.files import check_writable, write_text


@click.command("explain", cls=ModelCommand)
@click.argument("prompt")
@model_options()
@sampling_options(max_tokens=32)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--html", "html_file", metavar="FILE", type=click.Path(path_type=Path), help="Draw the steps' trees.")
def command(prompt: str, options: ModelOptions, params: SamplingParams, as_json: bool, html_file: Path | None) -> None:
    """Complete a prompt, and show what each step drafted and why it was accepted or rejected.

    A PROMPT "-" is read from standard input. For each node of a draft tree: whether it was accepted, the target's
    probability of it, and the draft's if it was sampled. Probabilities are those that verification used; at temperature
    0 they are those of temperature 1, and the likeliest token is marked.
    """
    (text,) = read_prompts([prompt])
    check_writable("--html", html_file)
    if sys.stderr.isatty():
        click.echo("Loading.", err=True)
    llm = options.load()
    about = {
        "model": str(options.keywords["model"]),
        "dtype": str(llm.engine.target.info.dtype).removeprefix("torch."),
        "speculative_config": options.speculative_config,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": params.seed,
        "max_tokens": params.max_tokens,
    }
    found = explain(llm, text, params, about)
    if html_file is not None:
        write_text("--html", html_file, html_of(found))
    if as_json:
        click.echo(json.dumps(found.for_json(), indent=1))
    else:
        print_explanation(make_console(), found)
    if found.finish_reason == "error":
        raise SpecdecError(f"the prompt failed: the model's logits were not finite there. {TRY}")
