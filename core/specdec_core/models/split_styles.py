"""What transformers' plans for tensor parallelism (`base_model_tp_plan`) mean by their names of styles."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen
class Style:
    """What ranks hold of a module or a parameter, and what they exchange.

    dim: which dimension of a weight [out, in] is split: 0 or 1; None: each rank holds all of it.
    num_pieces: parts of that dimension that are split each by itself, such as gate and up in one weight.
    sums: the ranks' outputs are added.
    gathers: the ranks' outputs are put side by side.
    narrows: the input is whole, and each rank takes its part of it.
    divides: the input is divided by the number of ranks, since the outputs of all ranks are added later.
    """

    dim: int | None = None
    num_pieces: int = 1
    sums: bool = False
    gathers: bool = False
    narrows: bool = False
    divides: bool = False


WHOLE = Style()
OF_HEAD = Style(dim=0, gathers=True)

STYLES: Mapping[str, Style] = {
    "colwise": Style(dim=0),
    "colwise_gather_output": Style(dim=0, gathers=True),
    "colwise_rep": Style(dim=0, gathers=True),
    "packed_colwise": Style(dim=0, num_pieces=2),
    "rowwise": Style(dim=1, sums=True),
    "rowwise_split_input": Style(dim=1, sums=True, narrows=True),
    "rowwise_rep": Style(dim=1, sums=True, narrows=True),
    "packed_rowwise": Style(dim=1, num_pieces=2),
    "moe_tp_experts": Style(sums=True),
    "moe_identity_expert": Style(divides=True),
    "replicated_with_grad_allreduce": WHOLE,
    "mla_kv_a_proj": WHOLE,
    "local_params": WHOLE,
    "replicate": WHOLE,
    "embedding_rowwise": WHOLE,  # splits the vocabulary, and adds the rows that are found
}
"""{name in a plan: style}. In a plan, "colwise" splits the outputs of a linear layer, "rowwise" its inputs."""
