"""spec-decode generate: complete prompts, with or without speculation."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from specdec_core.cli.options import TRY, ModelCommand, ModelOptions, model_options, read_prompts, sampling_options
from specdec_core.config.sampling import SamplingParams
from specdec_core.errors import SpecdecError

if TYPE_CHECKING:
    from specdec_core.api.llm import LLM


@click.command(cls=ModelCommand)
@click.argument("prompts", metavar="PROMPT...", nargs=-1, required=True)
@model_options()
@sampling_options(max_tokens=128)
@click.option("--no-stream", is_flag=True, help="Print a single completion whole, too.")
def command(
    prompts: tuple[str, ...],
    options: ModelOptions,
    params: SamplingParams,
    no_stream: bool,
) -> None:
    """Complete prompts and print the text.

    A PROMPT "-" is read from standard input. One prompt is streamed; several run together and are printed when they are
    complete. Times go to standard error.
    """
    texts = read_prompts(prompts)
    if sys.stderr.isatty():
        click.echo("Loading.", err=True)
    llm = options.load()
    started = perf_counter()
    if len(texts) == 1 and not no_stream:
        num_tokens, failed = _stream(llm, texts[0], params)
    else:
        num_tokens, failed = _print_whole(llm, texts, params)
    click.echo(
        _summary(llm, num_tokens, perf_counter() - started, speculates=options.speculative_config is not None), err=True
    )
    if failed:
        raise SpecdecError(
            f"prompt {', '.join(map(str, failed))} failed: the model's logits were not finite there. {TRY}"
        )


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> tuple[int, list[int]]:
    """Print one completion as it is generated. Returns the number of output tokens, and the numbers of failed
    prompts: [1] (the only prompt) or []."""
    num_tokens, reason = 0, None
    try:
        for output in llm.stream(prompt, params):
            click.echo(output.text, nl=False)
            num_tokens += len(output.pieces)
            reason = output.finish_reason
    finally:
        click.echo()
    return num_tokens, [1] if reason == "error" else []


def _print_whole(llm: LLM, prompts: list[str], params: SamplingParams) -> tuple[int, list[int]]:
    outputs = [request.outputs[0] for request in llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())]
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=1):
        if len(prompts) > 1:
            first_line = prompt.strip().partition("\n")[0]
            click.echo(f"=== {number}/{len(prompts)} {first_line}"[:80])
        click.echo(output.text)
    failed = [number for number, output in enumerate(outputs, start=1) if output.finish_reason == "error"]
    return sum(len(output.token_ids) for output in outputs), failed


def _summary(llm: LLM, num_tokens: int, seconds: float, *, speculates: bool) -> str:
    summary = f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s"
    if not speculates:
        return summary
    metrics: dict[str, Any] = {metric.name.partition(":")[2]: metric.value for metric in llm.get_metrics()}
    num_drafts = metrics["spec_decode_num_drafts"]
    num_accepted = metrics["spec_decode_num_accepted_tokens"]
    if not num_drafts:
        return f"{summary}, nothing was drafted"
    return f"{summary}, acceptance length {1 + num_accepted / num_drafts:.2f} over {num_drafts} drafts"
