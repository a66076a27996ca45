"""The contract of a verifier: its inputs, the verdict that it returns, and how a plugin offers one."""

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
    """What a verifier returns: each request's accepted draft tokens (a path down its tree) and the token after them.
    The tensors may be on any device; the engine copies them to the host once per step."""

    token_ids: torch.Tensor  # int64 [batch, max_depth + 1]   accepted path, then the recovered or bonus token; -1
    #                          pads. All -1: the request's logits were not finite and it fails. The path may run past
    #                          a stop: the engine cuts it when it emits tokens
    rows: torch.Tensor  # int32 [batch, max_depth + 1]   row of target logits that decided each token: [:, 0] the
    #                     root's, [:, j] the j-th accepted node's own; past the path, the last such row again. A
    #                     failed request's rows mean nothing
    num_accepted: torch.Tensor  # int32 [batch]   accepted draft tokens, never counting the recovered or bonus token

    def on_host(self) -> Verdict:
        return Verdict(self.token_ids.cpu(), self.rows.cpu(), self.num_accepted.cpu())


class Stream(IntEnum):
    """The purpose of a random draw. Draws of different streams are independent, also at the same seed and position."""

    TARGET = 0  # rule 1: the token emitted at a position, the same with and without speculation
    DRAFT = 1  # a proposer's draws
    ACCEPT = 2  # a verifier's accept-or-reject
    RECOVER = 3  # a verifier's token after a rejection


class RandomSource(Protocol):
    """The only source of random numbers in a step, made for the seeds and root positions of a batch of requests.

    It returns drawn tokens and booleans, never uniform numbers, so that a test can replace it by a source that
    enumerates all outcomes with their probabilities. A draw depends only on its keys, named below, not on the rest of
    the batch. A root is a request's last token, a node a draft token.
    """

    def target_token(self, weights: torch.Tensor, requests: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        """Draw the target's own token at each row of logits, keyed by (seed, index of that token in its request).

        weights: float [n, vocab], non-negative, unnormalized.
        requests: int64 [n], indices into the batch.
        depths: int64 [n], depth of each row's node in its tree (root: 0).
        Returns int64 [n], the same tokens with and without speculation.
        """

    def categorical(
        self, weights: torch.Tensor, stream: Stream, requests: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        """Draw one index per row of weights float [n, vocab], keyed by (seed, root position, node, stream).

        nodes: int64 [n], numbers that differ between all draws for the same request and stream in this step.
        Returns int64 [n].
        """

    def bernoulli(
        self, prob: torch.Tensor, stream: Stream, requests: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        """Draw True with probability prob, float [n], keyed as in `categorical`. Returns bool [n]."""


class Verifier(Protocol):
    """Decides which draft tokens (nodes of the draft's trees) are accepted.

    A verifier gets processed logits: temperature, penalties, masks and truncation have been applied to every row, given
    the tokens before it. At temperature 0 they are -inf except at the argmax. Only the verifier "greedy", used if every
    request of a step is greedy, gets logits without that mask, in the target's dtype. A lossless verifier emits tokens
    with exactly the distribution that these logits define. A lossy verifier's verdict counts only above temperature 0:
    a greedy request gets the argmax, and `lossless=True`. To relax acceptance there, give it a low temperature.

    Handle all requests and the whole vocabulary at once; Python may loop over depth and siblings. Ignore dead (padding)
    nodes: `draft.num_live_per_request` and `draft.layout.is_alive` exclude them.
    """

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        """Return accepted tokens and the token after them. logits: float32 [num_rows, vocab], a row per root and node.

        A request fails (all -1) if its accepted path reaches a row with NaN or +inf, or with nothing but -inf. Other
        requests are not affected. If a verifier draws random numbers, a request fails also if the path could have
        reached such a row: whether a request fails must not depend on a draw.
        """


@frozen(eq=False)
class VerifierSpec:
    """Describes a verifier to the engine; returned by the hook `specdec_verifiers` before any heavy import.

    name: what users give as `verifier`.
    build: returns the Verifier. Called with the config, if there is one, and with the operations named in `ops`.
    api: the version of the plugin API that the plugin is written for (PLUGIN_API).
    lossless: whether emitted tokens have the target's distribution. If not, it is used only where users name it.
    config: attrs class of the verifier's own keys in speculative_config; constructing it validates them.
    chains_only: whether it verifies only chains: every draft that it gets has is_chain set, or no draft tokens.
    greedy_only: whether it gets only requests with temperature 0.
    """

    name: str
    build: Callable[..., Verifier]
    api: int
    lossless: bool = True
    config: type | None = None
    chains_only: bool = False
    greedy_only: bool = False
    ops: tuple[str, ...] = ()  # operations of `specdec_core.ops` that `build` gets, as keywords of their names
