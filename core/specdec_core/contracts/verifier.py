"""The contract of a verifier: what it is given, what it decides, and how a plugin offers one."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from specdec_core.contracts.draft import Draft

if TYPE_CHECKING:
    import torch


@frozen(eq=False)
class Verdict:
    """What a verifier decided, on any device: the engine copies it to the host, once in a step."""

    token_ids: torch.Tensor  # int64 [batch, max_depth + 1]   accepted path, then the recovered or bonus token; -1
    #                          pads. All -1: the request's logits were not finite and it fails. The path may run past
    #                          a stop: whoever emits cuts it
    rows: torch.Tensor  # int32 [batch, max_depth + 1]   row of target_logits that decided each token: [:, 0] the
    #                     root's, [:, j] the j-th accepted node's own; past the path, the last decided row again
    num_accepted: torch.Tensor  # int32 [batch]   accepted draft tokens, never counting the recovered or bonus token

    def on_host(self) -> Verdict:
        return Verdict(self.token_ids.cpu(), self.rows.cpu(), self.num_accepted.cpu())


class Stream(IntEnum):
    """Separate streams of noise: a draw of one never repeats a draw of another."""

    TARGET = 0  # rule 1: the token emitted at a position, the same with and without speculation
    DRAFT = 1  # a proposer's draws
    ACCEPT = 2  # a verifier's accept-or-reject
    RECOVER = 3  # a verifier's token after a rejection


class RandomSource(Protocol):
    """All chance in a step, bound to the seeds and root positions of a batch of requests.

    There are no bare uniforms, so that a test can put an enumerating source in its place and add up every outcome.
    Draws depend on nothing but the keys named below: not on the batch, its order or its size.
    """

    def target_token(self, weights: torch.Tensor, requests: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        """The target's own token at each row, keyed by (seed, absolute index of that token): rule 1.

        weights float [n, vocab] (non-negative, unnormalized), requests int64 [n] indices into the batch, depths
        int64 [n] of the rows' nodes (root: 0). Returns int64 [n].
        """

    def categorical(
        self, weights: torch.Tensor, stream: Stream, requests: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        """One index per row of weights float [n, vocab], keyed by (seed, root position, node, stream).

        nodes int64 [n]: any number that is unique within the request and stream at this step. Returns int64 [n].
        """

    def bernoulli(
        self, prob: torch.Tensor, stream: Stream, requests: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        """True with probability prob float [n], keyed as in `categorical`. Returns bool [n]."""


class Verifier(Protocol):
    """Decides which nodes of a draft the target accepts.

    A verifier sees processed logits only: temperature, penalties, masks and truncation have been applied to every
    row, with that row's own history. At temperature 0 they are -inf except at the argmax; where every request of a
    step is greedy, the verifier "greedy" decides and sees them as they are. A lossless verifier emits tokens with
    exactly the distribution that these logits define. A lossy one decides only above temperature 0: of a request at
    temperature 0 its verdict is not used, the argmax decides, and the output says `lossless=True`. So acceptance cannot
    be relaxed for greedy decoding; give such requests a low temperature instead.

    A verifier is vectorized over requests and vocabulary; Python may loop over depth and siblings. Dead nodes are for
    no rule to look at: a request's length is `draft.num_live_per_request`, and `draft.layout.is_alive` says which nodes
    count.
    """

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        """logits float32 [num_rows, vocab] (see `contracts.draft`). A row that is not finite anywhere (NaN, +inf, or
        -inf throughout) fails its request if the path reaches it, and touches no other request. A rule that flips
        coins fails it wherever the path could have gone: the request starts over, and a coin must not decide that."""


@frozen(eq=False)
class VerifierSpec:
    """A verifier as data: returned by the hook `specdec_verifiers`, before anything heavy is imported.

    build: () -> Verifier, or (config) -> Verifier if there is a config.
    lossless: whether what it emits has the target's distribution. Only lossless ones are ever chosen unasked, and only
    they decide at temperature 0.
    config: attrs class of the verifier's own keys in speculative_config; constructing it validates them.
    chains_only: it is never given a draft with live nodes that is not marked as a chain.
    greedy_only: it is never given requests with a temperature.
    """

    name: str
    build: Callable[..., Verifier]
    api: int
    lossless: bool = True
    config: type | None = None
    chains_only: bool = False
    greedy_only: bool = False
