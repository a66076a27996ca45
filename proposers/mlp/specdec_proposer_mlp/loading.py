"""Checking and loading the published checkpoint of an MLP speculator."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from operator import mul

from attrs import frozen

from specdec_core import Checkpoint, CompatibilityError, ConfigError, TargetInfo
from specdec_proposer_mlp.config import MLPSpeculatorConfig
from specdec_proposer_mlp.head_config import SpeculatorConfig
from specdec_proposer_mlp.module import Speculator

PREFIX = "speculator."
MOST_PATHS = 4096  # each is computed, whether it is drafted or not


@frozen(eq=False)
class Found:
    """A speculator whose checkpoint was found and checked; its weights are not loaded yet."""

    head: SpeculatorConfig
    checkpoint: Checkpoint
    num_weights: int


def default_num_tokens(options: MLPSpeculatorConfig) -> int:
    """Return how many tokens a draft has if the user gives no number: one for each of the speculator's heads, or all
    nodes of the tree. Raises ConfigError or CompatibilityError if its config.json is not valid."""
    checkpoint = Checkpoint(str(options.model), options.revision)
    with checkpoint.reading_config() as config:
        head = SpeculatorConfig.read(config)
    if options.n_candidates is None:
        return head.n_predict
    return most_nodes(options.top_k_tokens_per_head or head.top_k_tokens_per_head, options.n_candidates)


def most_nodes(top_k: Sequence[int], num_candidates: int) -> int:
    """The number of nodes in a tree of num_candidates paths, if no two of them share more than they must."""
    return sum(min(num_candidates, num_paths) for num_paths in accumulate(top_k, mul))


def find(options: MLPSpeculatorConfig, target: TargetInfo, num_speculative_tokens: int) -> Found:
    """Read a speculator's configuration and check the shapes of its tensors, without loading weights.

    Raises ConfigError if the checkpoint cannot be found or has too few heads for the options, CompatibilityError if it
    does not fit the target or is incomplete.
    """
    checkpoint = Checkpoint(str(options.model), options.revision)
    with checkpoint.reading_config() as config:
        head = SpeculatorConfig.read(config)
        head.check_target(target, config)
    _check_options(options, head, num_speculative_tokens)
    outline = checkpoint.outline(lambda: Speculator(head), _names(head), PREFIX.__add__)
    return Found(head, checkpoint, sum(each.numel() for each in outline.parameters()))


def load(found: Found, target: TargetInfo) -> Speculator:
    """Load a speculator's weights in the target's dtype and onto its device. Raises CompatibilityError if weights that
    are to be tied differ."""
    _check_ties(found)
    module = Speculator(found.head)
    found.checkpoint.load_into(module, _names(found.head), dtype=target.dtype, device=target.device)
    return module


def _check_options(options: MLPSpeculatorConfig, head: SpeculatorConfig, num_speculative_tokens: int) -> None:
    options.check(num_speculative_tokens)
    if options.n_candidates is None:
        depth = options.shape(num_speculative_tokens).depth
        options.check_depth(depth, head.n_predict, f"the MLP speculator {str(options.model)!r}")
        return
    top_k = options.top_k_tokens_per_head or head.top_k_tokens_per_head
    if len(top_k) != head.n_predict:
        raise ConfigError(
            f"top_k_tokens_per_head={list(top_k)} has {len(top_k)} numbers, but the MLP speculator "
            f"{str(options.model)!r} has {head.n_predict} heads: give a number for each"
        )
    if not options.n_candidates <= prod(top_k) <= MOST_PATHS:
        raise ConfigError(
            f"top_k_tokens_per_head={list(top_k)} makes {prod(top_k)} paths, of which n_candidates="
            f"{options.n_candidates} are drafted: it must make at least as many, and at most {MOST_PATHS}"
        )
    most = most_nodes(top_k, options.n_candidates)
    if num_speculative_tokens > most:
        raise ConfigError(
            f"num_speculative_tokens={num_speculative_tokens}, but n_candidates={options.n_candidates} paths by "
            f"top_k_tokens_per_head={list(top_k)} have at most {most}: lower it, or leave it out"
        )


def _check_ties(found: Found) -> None:
    """Check that with tied weights, the tensors that a checkpoint has for further heads are the same as the first."""
    name_in_module = _names(found.head)
    for published in found.checkpoint.shapes:
        if name_in_module(published) is None:
            is_proj = published.removeprefix(PREFIX).startswith("proj.")
            first = re.sub(r"\d+", "1" if is_proj else "0", published, count=1)
            one, other = (found.checkpoint.load([name])[name] for name in (first, published))
            if not one.equal(other):
                raise CompatibilityError(
                    f"config.json of the MLP speculator {found.checkpoint.name!r} has tie_weights: true, but "
                    f"{published} differs from {first}: set it to false, or download the speculator again"
                )


def _names(head: SpeculatorConfig) -> Callable[[str], str | None]:
    """Return a function from the published name of a tensor to its name in `Speculator`. With tied weights, a
    checkpoint may hold a tensor once or for every head; the function then returns None for all but the first."""

    def name_in_module(published: str) -> str | None:
        name = published.removeprefix(PREFIX)
        match = re.match(r"(emb|proj|head|ln)\.(\d+)\.", name)
        if head.tie_weights and match and int(match[2]) > (match[1] == "proj"):
            return None
        return name

    return name_in_module
