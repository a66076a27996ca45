"""What `spec-decode explain` finds out about the steps of the embedded model: drafts, accepted paths, probabilities,
which forward passes of transformers confirm."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import AutoModelForCausalLM

from specdec_core import LLM, Draft, SamplingParams
from specdec_core.contracts.draft import DEAD, DraftTree
from specdec_core.contracts.report import StepReport
from specdec_core.contracts.verifier import Verdict
from specdec_core.engine.verification import StepTrace
from specdec_model_tiny import model_path
from specdec_tools.explained import ACCEPTED, CUT, NOT_REACHED, REJECTED, draft_probs, explain, step_of

PROMPT = """\
def mean(values):
    return sum(values) / len(values)


def variance(values):
    return sum((value - mean(values)) ** 2 for value in values) / len(values)


def deviation("""
GREEDY = SamplingParams(temperature=0, max_tokens=32)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, max_tokens=24)  # without a seed, so drafts are sampled
RUNS = {
    "ngram": ({"method": "ngram", "prompt_lookup_min": 1}, 6, GREEDY),
    "suffix": ({"method": "suffix", "suffix_decoding_min_token_prob": 0}, 6, GREEDY),
    "eagle3": ({"method": "eagle3"}, 10, GREEDY),
    "several": ({"method": ["ngram", "eagle3"]}, 8, GREEDY),
    "sampled eagle3": ({"method": "eagle3"}, 6, SAMPLED),
    "sampled draft_model": ({"method": "draft_model"}, 4, SAMPLED),
}


@pytest.fixture(scope="module", params=RUNS)
def run(request):
    """An explanation, its sampling parameters and its `LLM`."""
    config, number, params = RUNS[request.param]
    config = {**config, "num_speculative_tokens": number, "adaptive_draft_length": False}
    with LLM("tiny", dtype="float32", speculative_config=config) as llm:
        yield explain(llm, PROMPT, params, {"model": "tiny"}), params, llm


@pytest.fixture(scope="module")
def plain():
    """The tokens of plain greedy decoding."""
    with LLM("tiny", dtype="float32") as llm:
        return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@cache
def transformer(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def logits_after(folder, token_ids):
    """The logits after a text, [vocab], of transformers' own forward pass."""
    with torch.inference_mode():
        return transformer(folder)(torch.tensor([token_ids])).logits[0, -1].double()


def probs_after(token_ids, params, folder=None):
    """The distribution after a text, with temperature, top_k and top_p; at temperature 0 the softmax."""
    logits = logits_after(folder or model_path(), tuple(token_ids))
    if params.is_greedy:
        return logits.softmax(0)
    probs = (logits / params.temperature).softmax(0)
    probs = torch.where(probs >= probs.topk(params.top_k).values[-1], probs, 0)
    probs /= probs.sum()
    in_order, tokens = probs.sort(descending=True)
    probs[tokens[in_order.cumsum(0) - in_order >= params.top_p]] = 0
    return probs / probs.sum()


def contexts_of(found):
    """Yield each step with the tokens before it."""
    known = list(found.prompt_token_ids)
    for step in found.steps:
        assert step.num_tokens == len(known)
        yield step, tuple(known)
        known += step.token_ids


def path_to(step, index):
    """The tokens from the root's child down to a node."""
    path = []
    while index >= 0:
        path.insert(0, step.nodes[index].token_id)
        index = step.nodes[index].parent
    return tuple(path)


def accepted_of(step):
    return [node for node in step.nodes if node.state == ACCEPTED]


def test_accepted_nodes_spell_the_text(run, plain):
    found, params, llm = run
    token_ids = [token for step in found.steps for token in step.token_ids]
    assert token_ids == [piece.token_id for piece in found.pieces]
    assert llm.get_tokenizer().decode(token_ids, skip_special_tokens=True) == found.text
    assert not params.is_greedy or token_ids == plain
    for step in found.steps:
        accepted = accepted_of(step)
        assert [node.depth for node in accepted] == [*range(1, len(accepted) + 1)]
        end = -1
        for node in accepted:
            assert node.parent == end
            end = step.nodes.index(node)
        tokens = [node.token_id for node in accepted]
        tokens += [step.next_token.token_id] if step.next_token is not None else []
        assert tokens == [*step.token_ids]


def test_counts_and_text_are_those_of_the_output(run):
    """Of another engine with the same options, which traces nothing."""
    found, params, llm = run
    with LLM("tiny", dtype="float32", speculative_config=llm.speculative_config) as other:
        (output,) = other.generate(PROMPT, params, use_tqdm=False)
    counts = output.speculation
    assert output.outputs[0].text == found.text
    assert output.outputs[0].finish_reason == found.finish_reason
    assert found.totals["num_drafts"] == counts.num_drafts
    assert found.totals["num_draft_tokens"] == counts.num_draft_tokens
    assert found.totals["num_accepted"] == counts.num_accepted > 0
    assert found.totals["acceptance_length"] == pytest.approx(output.speculation.acceptance_length)
    assert sum(piece.is_draft for piece in found.pieces) == counts.num_accepted
    assert llm.engine.tracer is None


def test_probabilities_are_those_of_an_independent_forward_pass(run):
    found, params, _ = run
    for step, known in contexts_of(found):
        for index, node in enumerate(step.nodes):
            probs = probs_after(known + path_to(step, node.parent), params)
            assert node.target_prob == pytest.approx(float(probs[node.token_id]), abs=1e-4), (step.number, index)
            assert node.is_likeliest == (int(probs.argmax()) == node.token_id)
        if step.next_token is not None:
            probs = probs_after(known + step.token_ids[: step.num_accepted], params)
            assert step.next_token.target_prob == pytest.approx(float(probs[step.next_token.token_id]), abs=1e-4)
            assert step.next_token.target_prob > 0
            top = [token for token in probs.topk(3).indices.tolist() if probs[token] > 0]
            assert [each.token_id for each in step.likeliest] == top
            assert [each.target_prob for each in step.likeliest] == pytest.approx(probs[top].tolist(), abs=1e-4)


def test_rejected_nodes_and_the_recovered_token(run):
    found, params, _ = run
    assert any(node.state == REJECTED for step in found.steps for node in step.nodes)
    for step, known in contexts_of(found):
        accepted = accepted_of(step)
        end = step.nodes.index(accepted[-1]) if accepted else -1
        for node in step.nodes:
            on_path = node.parent == -1 or step.nodes[node.parent].state == ACCEPTED
            assert (node.state in (ACCEPTED, REJECTED, CUT)) == on_path
        if params.is_greedy and step.next_token is not None:
            likeliest = int(probs_after(known + step.token_ids[: len(accepted)], params).argmax())
            assert step.next_token.token_id == likeliest
            assert step.next_token.is_likeliest
            assert likeliest not in [step.nodes[child].token_id for child in step.children(end)]
            assert all(node.is_likeliest for node in accepted)
        kind = "plain" if not step.nodes else "recovered" if step.children(end) else "bonus"
        assert step.next_kind == kind
        assert bool(step.verifier) == bool(step.nodes)


def test_each_node_has_the_methods_that_drafted_it(run):
    found, _, llm = run
    names = tuple(drafter.proposer.name for drafter in llm.engine._speculation.drafters)
    assert found.methods == names
    for step in found.steps:
        for node in step.nodes:
            assert node.methods
            assert set(node.methods) <= set(names)
            if node.parent >= 0:
                assert set(node.methods) <= set(step.nodes[node.parent].methods)
    pieces = iter(found.pieces)  # as the engine attributes them
    for step in found.steps:
        own = [next(pieces).methods for _ in step.token_ids]
        assert own[: step.num_accepted] == [node.methods for node in accepted_of(step)]


def test_ngram_drafts_what_followed_the_same_tokens():
    """So it is known without the proposers which of two has drafted a token."""
    config = {"method": ["ngram", "eagle3"], "num_speculative_tokens": 8, "adaptive_draft_length": False}
    with LLM("tiny", dtype="float32", speculative_config=config) as llm:
        found = explain(llm, PROMPT, GREEDY, {})
    seen = set()
    for step, known in contexts_of(found):
        for index, node in enumerate(step.nodes):
            path = path_to(step, index)
            text, whole = known[-1:] + path, known + path
            is_copy = any(whole[at : at + len(text)] == text for at in range(len(known) - 1))
            assert is_copy or "ngram" not in node.methods, "it drafts only what it finds"
            seen.add(node.methods)
    assert seen == {("ngram",), ("eagle3",), ("ngram", "eagle3")}


def test_the_draft_probabilities_are_those_of_the_draft_model():
    config = {"method": "draft_model", "num_speculative_tokens": 4, "adaptive_draft_length": False}
    with LLM("tiny", dtype="float32", speculative_config=config) as llm:
        found = explain(llm, PROMPT, SAMPLED, {})
    folder = model_path() / "drafts" / "draft_model"
    num_sampled = 0
    for step, known in contexts_of(found):
        for index, node in enumerate(step.nodes):
            logits = logits_after(folder, known + path_to(step, node.parent))
            probs = (logits / SAMPLED.temperature).softmax(0)
            assert node.draft_prob == pytest.approx(float(probs[node.token_id]), abs=1e-4), (step.number, index)
            num_sampled += 1
    assert num_sampled > 10


def test_chosen_tokens_have_no_draft_probability(run):
    found, params, _ = run
    nodes = [node for step in found.steps for node in step.nodes]
    assert all((node.draft_prob is None) == params.is_greedy for node in nodes)


def test_times_are_those_of_the_reports(run):
    found, _, _ = run
    for step in found.steps:
        assert [*step.seconds] == ["drafting", "forward_pass", "verification", "rest"]
        assert all(value >= 0 for value in step.seconds.values())
        assert step.total_s > 0


def trace_of(draft, token_ids, rows, num_accepted, own_drafts=None):
    probs = torch.rand(draft.num_nodes + 1, 50, generator=torch.Generator().manual_seed(0)).softmax(1)
    verdict = Verdict(torch.tensor([token_ids]), torch.tensor([rows], dtype=torch.int32), torch.tensor([num_accepted]))
    return StepTrace(["r"], own_drafts or {"one": draft}, draft, verdict, probs)


describe = partial(step_of, number=1, known=[3, 4], text_of=str)


def test_dead_nodes_are_left_out():
    draft = Draft.from_trees([DraftTree([5, 6, 7, 8], [-1, DEAD, 1, 0])])
    trace = trace_of(draft, [5, 8, 9], [0, 1, 4], 2)
    step = describe(trace, StepReport(output_per_request={"r": 3}))
    assert [(node.token_id, node.parent, node.state) for node in step.nodes] == [(5, -1, ACCEPTED), (8, 0, ACCEPTED)]
    expected = [float(trace.target_probs[row, token]) for row, token in ((0, 5), (1, 8))]
    assert [node.target_prob for node in step.nodes] == expected
    assert step.next_token.target_prob == float(trace.target_probs[4, 9])
    assert (step.root, step.next_kind, step.token_ids) == ("4", "bonus", (5, 8, 9))


def test_where_an_output_ends():
    draft = Draft.from_chains([[5, 6, 7]])
    step = describe(trace_of(draft, [5, 6, 9, -1], [0, 1, 2, 2], 2), StepReport(output_per_request={"r": 1}))
    assert [node.state for node in step.nodes] == [ACCEPTED, CUT, REJECTED]
    assert (step.token_ids, step.next_token) == ((5,), None)
    failed = describe(trace_of(draft, [-1] * 4, [0] * 4, 0), StepReport())
    assert {node.state for node in failed.nodes} == {NOT_REACHED}
    assert (failed.token_ids, failed.next_token) == ((), None)


@given(
    q=st.lists(st.floats(0.01, 1), min_size=6, max_size=6),
    drawn=st.permutations(range(6)).map(lambda tokens: tokens[:3]),
    replaces=st.booleans(),
)
def test_the_draft_probability_of_a_sibling(q, drawn, replaces):
    """Of siblings drawn without replacement, what was left when it was drawn."""
    weights = torch.tensor([q])
    draft = Draft(
        torch.tensor([*drawn, 0]),
        torch.tensor([-1, -1, -1, 0], dtype=torch.int32),
        (0, 4),
        2,
        q=weights / weights.sum(),
        q_rows=torch.tensor([0, 0, 0, -1], dtype=torch.int32),
        with_replacement=replaces,
    )
    left, expected = dict(enumerate(q)), []
    for token in drawn:
        expected.append(left[token] / sum(left.values()))
        left[token] = left[token] if replaces else 0
    *found, chosen = draft_probs(draft, 6).tolist()
    assert found == pytest.approx(expected, rel=1e-4)
    assert chosen != chosen
