"""What happened in each step of one completion: the draft tree, the accepted path, and the probabilities behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from specdec_core.contracts.draft import Draft, DraftTree
from specdec_core.contracts.report import StepReport

if TYPE_CHECKING:
    import torch

    from specdec_core import Piece
    from specdec_core.api.llm import LLM
    from specdec_core.config.sampling import SamplingParams
    from specdec_core.engine.request import Request
    from specdec_core.engine.verification import StepTrace

NUM_LIKELIEST = 3

ACCEPTED, REJECTED, NOT_REACHED, CUT = "accepted", "rejected", "not reached", "after the end"
"""What becomes of a node: its token is output; its parent is accepted and it is not; its parent is not accepted; it is
accepted, but the output has ended before it."""


@frozen
class Token:
    """A token that may come next.

    target_prob: the target's probability of it there, with the sampling parameters applied; at temperature 0 that of
        temperature 1.
    is_likeliest: whether no other token is likelier there for the target.
    """

    token_id: int
    text: str
    target_prob: float
    is_likeliest: bool


@frozen
class Node:
    """A draft token.

    parent: an index into the nodes of its step; -1: the root.
    target_prob, is_likeliest: as a `Token` after its parent has them. At temperature 0 a likeliest token is accepted if
        its parent is.
    draft_prob: the draft's probability of it, if it was sampled; None: it was chosen.
    state: one of ACCEPTED, REJECTED, NOT_REACHED and CUT.
    methods: those that have drafted it.
    """

    token_id: int
    text: str
    parent: int
    depth: int
    target_prob: float
    draft_prob: float | None
    is_likeliest: bool
    state: str
    methods: tuple[str, ...]


@frozen
class Step:
    """One step of the engine.

    num_tokens: of the prompt and the output before the step. The root is the last of them.
    verifier: that decided; empty if there was no draft.
    token_ids: the output tokens of the step: those of the accepted nodes, then the next token.
    next_token: the token after the accepted nodes; None: the output ended before it, or the step was a part of the
        prompt's.
    next_kind: "recovered" after a rejection, "bonus" after full acceptance, "plain" without a draft.
    likeliest: the target's likeliest tokens in the place of the next token, of those that truncation leaves.
    seconds: of drafting, forward_pass, verification and rest.
    """

    number: int
    num_tokens: int
    root: str
    is_prefill: bool
    verifier: str
    nodes: tuple[Node, ...]
    token_ids: tuple[int, ...]
    next_token: Token | None
    next_kind: str
    likeliest: tuple[Token, ...]
    seconds: Mapping[str, float]

    @property
    def num_accepted(self) -> int:
        return sum(node.state == ACCEPTED for node in self.nodes)

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def children(self, parent: int) -> list[int]:
        return [index for index, node in enumerate(self.nodes) if node.parent == parent]


@frozen
class Explanation:
    """One completion.

    about: what was run.
    methods: that draft, in the order of their colors.
    pieces: the output tokens. rest: text that belongs to none of them.
    """

    about: Mapping[str, Any]
    prompt: str
    prompt_token_ids: tuple[int, ...]
    methods: tuple[str, ...]
    pieces: tuple[Piece, ...]
    rest: str
    finish_reason: str
    steps: tuple[Step, ...]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces) + self.rest

    @property
    def totals(self) -> dict[str, Any]:
        """Counts and seconds of all steps."""
        drafted = [step for step in self.steps if step.nodes]
        num_accepted = sum(step.num_accepted for step in drafted)
        return {
            "num_steps": len(self.steps),
            "num_drafts": len(drafted),
            "num_draft_tokens": sum(len(step.nodes) for step in drafted),
            "num_accepted": num_accepted,
            "acceptance_length": 1 + num_accepted / len(drafted) if drafted else None,
            "seconds": {part: sum(step.seconds[part] for step in self.steps) for part in self.steps[0].seconds},
        }

    @property
    def by_method(self) -> dict[str, tuple[int, int]]:
        """{method: how many tokens it has drafted, and how many of them were accepted}."""
        nodes = [node for step in self.steps for node in step.nodes]
        own = {method: [node for node in nodes if method in node.methods] for method in self.methods}
        return {method: (len(its), sum(node.state == ACCEPTED for node in its)) for method, its in own.items()}

    def for_json(self) -> dict[str, Any]:
        return {
            **self.about,
            "prompt": self.prompt,
            "prompt_token_ids": self.prompt_token_ids,
            "text": self.text,
            "token_ids": [piece.token_id for piece in self.pieces],
            "finish_reason": self.finish_reason,
            "methods": self.methods,
            "totals": self.totals,
            "steps": [asdict(step) | {"num_accepted": step.num_accepted} for step in self.steps],
        }


def explain(llm: LLM, prompt: str, params: SamplingParams, about: Mapping[str, Any]) -> Explanation:
    """Complete a prompt, and keep what happened in each step. No other request may be unfinished."""
    from specdec_core.api.prompts import PromptReader  # imports transformers, which listing plugins must not

    engine, tokenizer = llm.engine, llm.get_tokenizer()
    prompt_token_ids = PromptReader(tokenizer).read(prompt)[0].token_ids
    pieces: list[Piece] = []
    traces: list[StepTrace] = []
    steps: list[Step] = []
    requests: list[Request] = []

    def listen(request: Request, new: Sequence[Piece]) -> None:
        pieces.extend(new)
        requests[:] = [request]

    engine.tracer = traces.append
    request_id = engine.add_request(prompt_token_ids, params, listen, is_streamed=True)
    try:
        known = list(prompt_token_ids)
        while engine.is_unfinished(request_id):
            report = engine.step()
            for trace in traces:  # none if nothing could be scheduled
                steps.append(step_of(trace, report, len(steps) + 1, known, lambda token: tokenizer.decode([token])))
            traces.clear()
            known = [*prompt_token_ids, *(piece.token_id for piece in pieces)]
    finally:
        engine.tracer = None
        engine.cancel(request_id)
    config = llm.speculative_config
    configs = () if config is None else config if isinstance(config, tuple) else (config,)
    (request,) = requests
    return Explanation(
        about=about,
        prompt=prompt,
        prompt_token_ids=tuple(prompt_token_ids),
        methods=tuple(str(each.method) for each in configs),
        pieces=tuple(pieces),
        rest=request.rest,
        finish_reason=str(request.finish_reason),
        steps=tuple(steps),
    )


def step_of(
    trace: StepTrace, report: StepReport, number: int, known: Sequence[int], text_of: Callable[[int], str]
) -> Step:
    """Describe a step with a single request. known: the tokens of the prompt and of the output before it."""
    (request_id,) = trace.request_ids
    draft, probs = trace.draft, trace.target_probs.cpu().nan_to_num(0)
    layout, verdict = draft.host_layout, trace.verdict
    num_accepted, num_output = int(verdict.num_accepted[0]), report.output_per_request.get(request_id, 0)
    decided, rows = verdict.token_ids[0].tolist(), verdict.rows[0].tolist()
    path = [row - 1 for row in rows[1 : num_accepted + 1]]  # the root has row 0
    has_failed = decided[0] < 0  # the logits were not finite, and nothing was decided
    states = dict.fromkeys(path[:num_output], ACCEPTED) | dict.fromkeys(path[num_output:], CUT)
    drafters = _drafters(trace.own_drafts)
    own_probs = draft_probs(draft, probs.shape[1]).tolist()
    places = {-1: -1}  # of live nodes, here
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    nodes: list[Node] = []
    for index, (token_id, parent) in enumerate(zip(*draft.tree(0), strict=True)):
        if not layout.is_alive[index]:
            continue
        places[index], paths[index] = len(nodes), (*paths[parent], token_id)
        after = probs[layout.parent_rows[index]]
        is_tried = not has_failed and (parent == -1 or parent in path)
        nodes.append(
            Node(
                token_id,
                text_of(token_id),
                places[parent],
                len(paths[index]),
                target_prob=float(after[token_id]),
                draft_prob=None if own_probs[index] != own_probs[index] else own_probs[index],
                is_likeliest=bool(after[token_id] == after.max()),
                state=states.get(index, REJECTED if is_tried else NOT_REACHED),
                methods=tuple(method for method, drafted in drafters.items() if paths[index] in drafted),
            )
        )
    at_end = probs[rows[num_accepted]]
    likeliest = [token for token in at_end.topk(NUM_LIKELIEST).indices.tolist() if at_end[token] > 0]
    next_token = decided[num_accepted]
    end = places[path[-1]] if path else -1
    next_kind = "plain" if not nodes else "recovered" if any(node.parent == end for node in nodes) else "bonus"
    return Step(
        number=number,
        num_tokens=len(known),
        root=text_of(known[-1]),
        is_prefill=report.num_prefill_tokens > 0,
        verifier=report.verifier,
        nodes=tuple(nodes),
        token_ids=tuple(decided[: min(num_output, num_accepted + 1)]),
        next_token=_token(next_token, at_end, text_of) if num_output > num_accepted else None,
        next_kind=next_kind,
        likeliest=tuple(_token(token, at_end, text_of) for token in likeliest),
        seconds={
            "drafting": report.draft_s,
            "forward_pass": report.target_s - report.verify_s,
            "verification": report.verify_s,
            "rest": report.other_s,
        },
    )


def draft_probs(draft: Draft, vocab_size: int) -> torch.Tensor:
    """float [num_nodes]   the draft's probability of each node, by which verification divides: without earlier siblings
    that were drawn without replacement. NaN: the node was chosen, not sampled."""
    import torch

    from specdec_core.ops.residuals import Residuals
    from specdec_core.verifiers.siblings import Siblings, proposals_of

    given = draft.to("cpu")
    if given.q is None or given.q_rows is None:
        return torch.full((draft.num_nodes,), torch.nan)
    rows = given.layout.node_rows
    uniform = torch.zeros(given.num_nodes + given.batch_size, vocab_size)
    ratios = Residuals(uniform, proposals_of(given, Siblings.of(given), vocab_size)).ratios(rows)
    return (1 / (vocab_size * ratios)).masked_fill(given.q_rows < 0, torch.nan)


def _token(token_id: int, probs: torch.Tensor, text_of: Callable[[int], str]) -> Token:
    return Token(token_id, text_of(token_id), float(probs[token_id]), bool(probs[token_id] == probs.max()))


def _drafters(drafts: Mapping[str, Draft | None]) -> dict[str, set[tuple[int, ...]]]:
    """{method: the tokens from the root down to each node that it has drafted}."""
    return {method: _paths(draft.tree(0)) for method, draft in drafts.items() if draft is not None}


def _paths(tree: DraftTree) -> set[tuple[int, ...]]:
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for index, (token_id, parent) in enumerate(zip(*tree, strict=True)):
        if parent in paths:  # else it is dead, or below a dead node
            paths[index] = (*paths[parent], token_id)
    return {*paths.values()}
