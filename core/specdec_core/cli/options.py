"""Options for the model, for speculation and for sampling, and prompts. Several commands share them."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import frozen

from specdec_core.config.fields import unknown_key
from specdec_core.config.file import KEYS, OPTIONS, load_config_file
from specdec_core.config.options import Option, options_of
from specdec_core.config.sampling import SamplingParams
from specdec_core.config.speculative import SpeculativeConfig
from specdec_core.config.yaml_values import load_yaml
from specdec_core.errors import SpecdecError
from specdec_core.plugins import Plugins

if TYPE_CHECKING:
    from specdec_core.api.async_llm import AsyncLLM
    from specdec_core.api.llm import LLM
    from specdec_core.engine.design import Design

DEFAULT_MODEL = "tiny"
DEFAULT_NUM_SPECULATIVE_TOKENS = 5
TRY = "try --dtype float32, and check the checkpoint if that fails too"
"""Advice for logits that are not finite."""

OWN_OPTIONS = {
    "model": "--model",
    "dtype": "--dtype",
    "speculative_config": "--method and --set",
}
"""Keys of a config file that `--engine` does not take, and the options that do."""

TABLES = frozenset({"kv_manager_config"})
"""Keys of a config file whose value is a table of options."""

OWN_KEYS = ("method", "num_speculative_tokens")
"""Keys of speculative_config with an option of their own."""

DESCRIBED = {option.name: option for option in (*OPTIONS, *options_of(SpeculativeConfig))}


class ModelCommand(click.Command):
    """A click command with the options that `model_options` adds. Its `--help` ends with lists of the keys that
    `--engine` and `--set` take."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        engine = [option for option in OPTIONS if option.name not in OWN_OPTIONS]
        speculation = [option for option in options_of(SpeculativeConfig) if option.name not in OWN_KEYS]
        write_options(formatter, "Keys for --engine", engine)
        write_options(formatter, "Keys for --set, besides those that `spec-decode plugins METHOD` shows", speculation)
        super().format_epilog(ctx, formatter)


def write_options(formatter: click.HelpFormatter, title: str, options: Iterable[Option]) -> None:
    """Write a section of a command's help: a title and the options."""
    with formatter.section(title):
        formatter.write_dl([(option.name, _described(option)) for option in options])


def _described(option: Option) -> str:
    default = "required" if option.default is None else f"default: {option.default}"
    return f"{option.help}  [{'; '.join(filter(None, (option.allowed, default)))}]".lstrip()


class Setting(click.ParamType["tuple[str, Any]"]):
    """The click type of an option's value KEY=VALUE. VALUE is parsed as a YAML scalar (number, true, null or text) or a
    list of numbers, or of such lists; any other YAML value stays text."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        import yaml

        key, equals, text = value.partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is not KEY=VALUE: write it like prompt_lookup_max=4, without spaces", param, ctx)
        try:
            scalar = load_yaml(text)
        except (yaml.YAMLError, ValueError):
            return key, text
        is_kept = scalar is None or isinstance(scalar, bool | int | float | str) or _is_of_numbers(scalar)
        return key, scalar if is_kept else text


def _is_of_numbers(value: Any) -> bool:
    """Whether a value is a list of numbers, or of such lists."""
    if not isinstance(value, list):
        return False
    return all(_is_of_numbers(each) or type(each) in (int, float) for each in value)


@frozen
class ModelOptions:
    """The options for the model and for speculation, from the command line and the config file.

    keywords: the keyword arguments of `LLM`, except `plugins`.
    disable: names of plugins that are not imported.
    file: the config file; None: none was given.
    """

    keywords: Mapping[str, Any]
    disable: tuple[str, ...]
    file: Path | None = None

    @property
    def speculative_config(self) -> Mapping[str, Any] | None:
        config: Mapping[str, Any] | None = self.keywords["speculative_config"]
        return config

    def with_keywords(self, **keywords: Any) -> ModelOptions:
        return ModelOptions({**self.keywords, **keywords}, self.disable, self.file)

    def load(self, plugins: Plugins | None = None) -> LLM:
        """Make an `LLM`, which is closed when the command ends.

        plugins: the plugins to use. None: all installed plugins, except those in `disable`.
        """
        _quieten_transformers()

        from specdec_core.api.llm import LLM

        llm = LLM(**self.keywords, plugins=plugins or Plugins.load(disable=self.disable))
        return click.get_current_context().with_resource(llm)

    def load_async(self) -> AsyncLLM:
        """Make an `AsyncLLM`, which the caller shuts down."""
        _quieten_transformers()

        from specdec_core.api.async_llm import AsyncLLM

        return AsyncLLM(**self.keywords, plugins=Plugins.load(disable=self.disable))

    def dry_run(self) -> Design:
        """Check the options and plan the memory as `load` does, without loading weights. Returns the engine's
        `Design`."""
        _quieten_transformers()

        from specdec_core.api.arguments import dry_run

        return dry_run(**self.keywords, plugins=Plugins.load(disable=self.disable))


def _quieten_transformers() -> None:
    """Hide the progress bars and warnings of transformers."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def model_options(
    *,
    method: str | None = None,
    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS,
    dtype: str = "auto",
    many_configs: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds options for the model and for speculation to a command. The command gets them as its
    argument `options`, a `ModelOptions`.

    method, num_speculative_tokens, dtype: defaults, used if neither the command line nor the config file has a value.
    many_configs: whether --config may be given several times. The command then gets a list of `ModelOptions`, one for
        each file, or a single one without a file.
    """
    default = {"method": method, "num_speculative_tokens": num_speculative_tokens}
    repeatable = " Repeatable." if many_configs else ""
    options = (
        click.option("--config", "config_files", metavar="FILE", type=click.Path(path_type=Path), multiple=many_configs,
                     help="A TOML, YAML or JSON file with the keywords of LLM. The options below override it."
                     f"{repeatable}"),
        click.option("--model", show_default=DEFAULT_MODEL, help=DESCRIBED["model"].help),
        click.option("--method", "chosen_method", metavar="NAME", show_default=method or "none, plain decoding",
                     help="A proposer that `spec-decode plugins` lists, or several, as in suffix,eagle3."),
        click.option("--set", "settings", type=Setting(), multiple=True,
                     help="A key of speculative_config (repeatable): `spec-decode plugins METHOD` shows the method's."),
        click.option("--num-speculative-tokens", "num_tokens", type=click.IntRange(min=1), metavar="N",
                     show_default=f"the method's own, or {num_speculative_tokens}",
                     help=DESCRIBED["num_speculative_tokens"].help),
        click.option("--dtype", "chosen_dtype", metavar="NAME", show_default=dtype,
                     help=f"{DESCRIBED['dtype'].help} Give {DESCRIBED['dtype'].allowed}."),
        click.option("--engine", type=Setting(), multiple=True,
                     help="Any other key of a config file, such as max_model_len=2048 (repeatable): they are listed "
                     "below. null stands for None; kv_manager_config.OPTION=VALUE sets one of its options."),
        click.option("--disable", multiple=True, metavar="NAME", help="Do not import this plugin (repeatable)."),
    )  # fmt: skip

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def command(
            config_files: Path | Sequence[Path] | None,
            model: str | None,
            chosen_method: str | None,
            settings: Sequence[tuple[str, Any]],
            num_tokens: int | None,
            chosen_dtype: str | None,
            engine: Sequence[tuple[str, Any]],
            disable: tuple[str, ...],
            **others: Any,
        ) -> None:
            def read(file: Path | None) -> ModelOptions:
                keywords = load_config_file(file) if file is not None else {}
                for key, value in _engine_keywords(engine).items():
                    in_file = keywords.get(key)
                    keywords[key] = in_file | value if isinstance(in_file, dict) and isinstance(value, dict) else value
                keywords["model"] = model or keywords.get("model", DEFAULT_MODEL)
                keywords["dtype"] = chosen_dtype or keywords.get("dtype", dtype)
                speculation = keywords.get("speculative_config")
                keywords["speculative_config"] = _speculation(speculation, chosen_method, settings, num_tokens, default)
                return ModelOptions(keywords, disable, file)

            if isinstance(config_files, Path | None):
                function(options=read(config_files), **others)
            else:
                function(options=[read(file) for file in config_files or (None,)], **others)

        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def sampling_options(*, max_tokens: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds options for sampling to a command, which gets them as its argument `params`, a
    `SamplingParams`. max_tokens: the default of --max-tokens."""
    options: dict[str, dict[str, Any]] = {
        "max_tokens": {"type": int, "default": max_tokens, "help": "Most tokens per completion."},
        "temperature": {"type": float, "default": 0.0, "help": "0: always the likeliest token."},
        "top_p": {"type": float, "default": 1.0, "help": "Sample among the likeliest of this mass."},
        "top_k": {"type": int, "default": 0, "help": "Sample among this many tokens; 0: all."},
        "seed": {"type": int, "help": "Another one gives other samples. Left out: drawn from the seed of --engine, 0."},
    }

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def command(**given: Any) -> None:
            function(params=SamplingParams(**{name: given.pop(name) for name in options}), **given)

        for name, settings in reversed(options.items()):
            command = click.option(f"--{name.replace('_', '-')}", show_default=True, **settings)(command)
        return command

    return decorate


def read_prompts(prompts: Sequence[str]) -> list[str]:
    """The texts of prompts, of which "-" is read from standard input. Raises click.UsageError."""
    if prompts.count("-") > 1:
        raise click.UsageError("standard input can be read once: give '-' once")
    return [_read_stdin() if prompt == "-" else prompt for prompt in prompts]


def _read_stdin() -> str:
    if sys.stdin is None:
        raise click.UsageError("'-' reads a prompt from standard input, but this process has no standard input")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not UTF-8 text: byte {error.start}") from error


def mentioned_keys(message: str) -> set[str]:
    """The keys of `--engine` that an error's message mentions. A key without an underscore counts only if "=" follows
    it, since it may be an ordinary word. The result is empty for an error about an unknown key, whose message lists all
    keys."""
    if " The keys are " in message:
        return set()
    keys = KEYS - OWN_OPTIONS.keys() - {"skip_tokenizer_init"}  # commands take text
    return {key for key in keys if re.search(rf"\b{key}\b" if "_" in key else rf"\b{key}=", message)}


def _engine_keywords(settings: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Convert the values of `--engine` to keywords of `LLM`. If a keyword is a dict of options, each option is given
    separately: `kv_manager_config.max_cached_blocks=4`. Raises click.UsageError."""
    found: dict[str, Any] = {}
    for path, value in settings:
        key, _, inner = path.partition(".")
        if key in OWN_OPTIONS:
            raise click.UsageError(f"--engine {path}={value}: give {key} as {OWN_OPTIONS[key]}")
        if key not in KEYS:
            raise click.UsageError(str(unknown_key(key, KEYS - OWN_OPTIONS.keys(), "--engine")))
        if (key in TABLES) != bool(inner):
            form = f"{key}.OPTION=VALUE, one for each option" if key in TABLES else f"{key}=VALUE"
            raise click.UsageError(f"--engine {path}={value}: write {form}")
        given = found.setdefault(key, {}) if inner else found
        if (inner or key) in given:
            raise click.UsageError(f"--engine {path}={value} is given twice: give {path} once")
        given[inner or key] = value
    return found


def _has_own_number(method: str | list[str] | None) -> bool:
    """Whether a method, or each of several, has a default of its own for num_speculative_tokens. False if `method` is
    None or cannot be loaded. The error of loading it is not raised here, but later, when the `LLM` is made."""
    with warnings.catch_warnings(), suppress(SpecdecError):
        warnings.simplefilter("ignore")
        plugins, names = Plugins.load(), [method] if isinstance(method, str) else method or []
        return bool(names) and all(plugins.proposer(name).num_speculative_tokens is not None for name in names)
    return False


def _speculation(
    in_file: Mapping[str, Any] | None,
    named: str | None,
    settings: Sequence[tuple[str, Any]],
    num_speculative_tokens: int | None,
    default: Mapping[str, Any],
) -> dict[str, Any] | None:
    """The speculative_config for `LLM`; None: no speculation. Raises click.UsageError.

    in_file: the config file's speculative_config, or None. The command line overrides its keys. Ignored if the command
        line names another method.
    named, num_speculative_tokens: from the command line; None: not given. named: a method, or several with commas
        between them.
    settings: keys and values of `--set`.
    default: defaults for "method" (may be None) and "num_speculative_tokens", used if neither the command line nor the
        file has a value.
    """
    config = dict(in_file or {})
    method: Any = named.split(",") if named is not None and "," in named else named
    if method is not None and config.get("method", method) != method:
        config = {}
    if not config:
        method = method or default["method"]
        config = {} if _has_own_number(method) else {"num_speculative_tokens": default["num_speculative_tokens"]}
    if method is None and not in_file:
        given = [f"--set {key}" for key, _ in settings]
        given += ["--num-speculative-tokens"] if num_speculative_tokens is not None else []
        if given:
            raise click.UsageError(f"{', '.join(given)} needs a method: give --method, too, or leave it out")
        return None
    if method is not None:
        config = {"method": method} | config
    if num_speculative_tokens is not None:
        config["num_speculative_tokens"] = num_speculative_tokens
    for index, (key, value) in enumerate(settings):
        if key == "method":
            raise click.UsageError(f"--set method={value} is not taken: give method as --method {value}")
        if key == "num_speculative_tokens" and num_speculative_tokens is not None:
            raise click.UsageError(
                f"--set {key}={value} and --num-speculative-tokens {num_speculative_tokens} say the same: give one of "
                f"them"
            )
        if key in (other for other, _ in settings[:index]):
            raise click.UsageError(f"--set {key}={value} is given twice: give {key} once")
        config[key] = value
    return config
