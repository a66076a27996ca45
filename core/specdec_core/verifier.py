"""The contract of a verifier, and how a plugin offers one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from specdec_core.types import Draft, RandomSource, Verdict

if TYPE_CHECKING:
    import torch


class Verifier(Protocol):
    """Decides which nodes of a draft the target accepts.

    A verifier sees processed logits only: temperature, penalties, masks and truncation have been applied to every
    row, with that row's own history. At temperature 0 they are -inf except at the argmax; where every request of a
    step is greedy, the verifier "greedy" decides and sees them as they are. A lossless verifier emits tokens with
    exactly the distribution that these logits define. It is vectorised over requests and vocabulary; Python may loop
    over depth and siblings.
    """

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        """logits float32 [num_rows, vocab] (see `specdec_core.types`). A row that is not finite anywhere (NaN, +inf,
        or -inf throughout) fails its request if the path reaches it, and touches no other request. A rule that flips
        coins fails it wherever the path could have gone: the request starts over, and a coin must not decide that."""
        ...


@frozen(eq=False)
class VerifierSpec:
    """A verifier as data: returned by the hook `specdec_verifiers`, before anything heavy is imported.

    build: () -> Verifier, or (config) -> Verifier if there is a config.
    lossless: whether what it emits has the target's distribution. Only lossless ones are ever chosen unasked.
    config: attrs class of the verifier's own keys in speculative_config; constructing it validates them.
    chains_only: it is never given a draft with nodes that is not marked as a chain.
    greedy_only: it is never given requests with a temperature.
    """

    name: str
    build: Callable[..., Verifier]
    api: int
    lossless: bool = True
    config: type | None = None
    chains_only: bool = False
    greedy_only: bool = False
