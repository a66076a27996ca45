"""Starts a training run from the weights of a trained draft, to fine-tune it or for a second stage of training."""

from __future__ import annotations

from typing import Any

from specdec_core import ConfigError, Plugins, ProposerSpec, explain_draft_kind


def start_from(model: str, trainee: Any, spec: ProposerSpec, options: Any) -> None:
    """Replace the weights of a new draft model in training by those of a checkpoint.

    model: the checkpoint, a folder or a name on the model hub.
    trainee: what the method's training recipe has made.
    spec: the method.
    options: the recipe's options. Those that are None take the checkpoint's values.

    Raises ConfigError or CompatibilityError if the checkpoint cannot be read, is incomplete, is not one of this method
    or for this target, or contradicts the options.
    """
    if not hasattr(trainee, "load"):
        raise ConfigError(
            f"start={model!r}: the training recipe of {spec.name!r} makes new weights only, since its trainee has no "
            f"method load: leave start out"
        )
    with explain_draft_kind(spec, model, None, Plugins.load()):
        found = trainee.load(model)
    given = {name: getattr(options, name) for name in found}
    differing = [name for name, value in found.items() if given[name] not in (None, value)]
    if differing:
        its, ours = (", ".join(f"{name}={of[name]}" for name in differing) for of in (found, given))
        raise ConfigError(
            f"the start {model!r} has {its}, and this run {ours}: give {its}, or start from another draft"
        )
