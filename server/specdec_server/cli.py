"""spec-decode serve: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import logging
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec_core import ConfigError
from specdec_core.cli.options import ModelCommand, ModelOptions, model_options
from specdec_server.settings import STREAM_INTERVAL_S, Settings

if TYPE_CHECKING:
    from specdec_core import AsyncLLM

PREFIX = "specdec"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
FORMATS = ("hermes", "llama3_json")  # tool_parsers.PARSERS, which `--help` does not import
PATH = click.Path(path_type=Path)


@click.command("serve", cls=ModelCommand)
@click.argument("served_model", metavar="[MODEL]", required=False)
@model_options()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at. 0.0.0.0: all of them.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one.")
@click.option(
    "--served-model-name",
    "names",
    multiple=True,
    metavar="NAME",
    show_default="MODEL",
    help="What requests call the model (repeatable).",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="SPECDEC_API_KEY",
    metavar="KEY",
    help="Answer only requests with this key (repeatable). The environment variable SPECDEC_API_KEY has keys, "
    "too, with spaces between them.",
)
@click.option(
    "--allowed-origin",
    "allowed_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let websites of this origin call the server (CORS, repeatable). '*': of any.",
)
@click.option(
    "--max-body-bytes",
    type=click.IntRange(min=1),
    default=4 * 2**20,
    show_default=True,
    help="The largest body of a request.",
)
@click.option(
    "--max-prompt-tokens",
    type=click.IntRange(min=1),
    show_default="what max_model_len leaves room for",
    help="The longest prompt.",
)
@click.option(
    "--max-queued",
    type=click.IntRange(min=0),
    default=1000,
    show_default=True,
    help="Completions that may wait while max_num_seqs others run. More are refused with status 429.",
)
@click.option(
    "--request-timeout",
    "request_timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    show_default="any time",
    help="Most seconds from a request's arrival to the end of its answer.",
)
@click.option(
    "--stream-interval",
    "stream_interval_s",
    type=click.FloatRange(min=0),
    default=STREAM_INTERVAL_S,
    metavar="S",
    show_default=True,
    help="Fewest seconds between two chunks of a stream, whose tokens come together. 0: a chunk for each step.",
)
@click.option(
    "--step-timeout",
    "step_timeout_s",
    type=click.FloatRange(min=0),
    metavar="S",
    show_default="30, and more on slow machines",
    help="Most seconds of an engine's step, after which it counts as hanging. 0: any time.",
)
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    type=click.FloatRange(min=0),
    default=30.0,
    metavar="S",
    show_default=True,
    help="Most seconds that running requests may take after SIGTERM or Ctrl-C.",
)
@click.option(
    "--chat-template",
    "template_file",
    type=PATH,
    metavar="FILE",
    show_default="the tokenizer's",
    help="A Jinja template that turns messages into a prompt.",
)
@click.option("--trust-request-chat-template", is_flag=True, help="Run chat templates that requests bring, too.")
@click.option(
    "--tool-call-parser",
    type=click.Choice(FORMATS),
    show_default="the one that the chat template shows",
    help="The format in which the model calls tools.",
)
@click.option(
    "--metrics-prefix",
    metavar="NAME",
    show_default=PREFIX,
    help="The names in /metrics begin with it. 'vllm': dashboards for vLLM find theirs.",
)
@click.option(
    "--access-log/--no-access-log",
    default=True,
    show_default=True,
    help="Write a line of JSON to standard error for each request.",
)
def serve(
    served_model: str | None,
    options: ModelOptions,
    host: str,
    port: int,
    names: tuple[str, ...],
    template_file: Path | None,
    metrics_prefix: str | None,
    **settings: Any,
) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    MODEL is a folder, a name on the model hub, or the name of an embedded model. The server answers at
    http://127.0.0.1:8000/v1 as soon as it says so. SIGTERM and Ctrl-C let running requests end first.
    """
    from specdec_server.app import make_app
    from specdec_server.serving import DrainingServer, bound_socket, end_engine

    if served_model is not None:
        if click.get_current_context().params["model"] is not None:
            raise click.UsageError("the model is given twice, as MODEL and as --model: give it once")
        options = options.with_keywords(model=served_model)
    if metrics_prefix is not None or "metrics_prefix" not in options.keywords:
        options = options.with_keywords(metrics_prefix=metrics_prefix or PREFIX)
    if "kv_manager" not in options.keywords:
        options = options.with_keywords(kv_manager="prefix")
    made = Settings(
        model_names=names or (str(options.keywords["model"]),),
        chat_template=None if template_file is None else _read_template(template_file),
        **settings,
    )
    if host not in LOOPBACK and not made.api_keys:
        click.echo(f"warning: every machine that reaches {host} can use the server: give --api-key, too", err=True)
    with ExitStack() as ending:
        listening = ending.enter_context(bound_socket(host, port))
        llm = options.load_async()
        app = make_app(llm, made)
        ending.callback(end_engine, llm, app.state.service.watchdog)
        _try_template(llm, made.chat_template)
        _log_to_stderr()
        address, port = listening.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address

        def tell() -> None:
            click.echo(f"Serving {made.model_names[0]} at http://{shown}:{port}/v1. Ctrl-C ends it.", err=True)

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn drains first, and then sends it again
        DrainingServer(app, made, tell).run(sockets=[listening])


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {file} is not UTF-8 text: byte {error.start}") from error


def _try_template(llm: AsyncLLM, template: str | None) -> None:
    """Warn if a template fails for the simplest conversation. It may be meant for others only."""
    if template is None:
        return
    try:
        llm.tokenize_chat([{"role": "user", "content": "Hello"}], chat_template=template)
    except ConfigError as error:
        click.echo(f"warning: --chat-template fails for a message of a user: {error}", err=True)


def _log_to_stderr() -> None:
    """Write log lines of level INFO to standard error: the engine's figures, and the access log as JSON alone."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    access, handler = logging.getLogger("specdec_server.access"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.handlers, access.propagate = [handler], False
