"""spec-decode warmup: compiles what a model and a method need, for an image or before the first request."""

from __future__ import annotations

from time import perf_counter

import click

from specdec_core.cli.options import ModelCommand, ModelOptions, model_options


@click.command(cls=ModelCommand)
@model_options()
def command(options: ModelOptions) -> None:
    """Build the engine once, so that its kernels are compiled and cached.

    Later processes of this user find the compiled code in the cache directory (NUMBA_CACHE_DIR names another one), also
    from other environments with the same version. It is for this processor: on another type, kernels compile anew.
    """
    started = perf_counter()
    options.load()
    click.echo(f"Ready in {perf_counter() - started:.1f} s.")
