"""Engine runs that cover all that can happen to a request under speculation: chunked prefill, drafts that are rejected
or accepted in part or in full, preemption and cancellation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import reference
import torch
from attrs import frozen
from probe_recorder import Drafted, Journal, RecordingPlugins
from tiny_models import save_tiny_model

from specdec_core import LLM, SamplingParams

VOCAB_SIZE = 10  # small, so that drafts made by chance are right now and then
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 56,
    "block_size": 4,
    "skip_tokenizer_init": True,
    "seed": 0,
}


@frozen
class Asked:
    prompt: list[int]
    params: SamplingParams  # of one completion


def random_requests(num_requests: int) -> list[Asked]:
    rng = np.random.default_rng(17)
    is_long = [i // 25 % 2 == 1 for i in range(num_requests)]  # few of these fit, or many of the others
    lengths = [int(rng.integers(16, 42) if long else rng.integers(1, 6)) for long in is_long]
    prompts = reference.prompts(VOCAB_SIZE, lengths, seed=2)
    asked: list[Asked] = []
    for i, prompt in enumerate(prompts):
        temperature = float(rng.choice([0.0, 1e-6, 0.8, 0.8, 0.8, 1.3]))
        params = SamplingParams(
            n=int(rng.integers(1, 4)) if temperature > 0.5 else 1,
            temperature=temperature,
            max_tokens=int(rng.integers(8, 23) if is_long[i] else rng.integers(6, 18)),
            seed=i,
            num_speculative_tokens=[None, None, 2, 3, 6][int(rng.integers(5))],
        )
        asked += [Asked(prompt, params.of_sample(index)) for index in range(params.n)]
    return asked[:num_requests]


@frozen(eq=False)
class Outcome:
    journal: Journal
    texts: dict[str, list[int]]  # request id -> prompt and output
    index_of: dict[str, int]  # request id -> which request was asked
    cancelled: set[str]
    num_steps: int
    num_preempted: int
    num_cached: int  # tokens that were found in the cache


def with_common_beginnings(asked: list[Asked]) -> list[Asked]:
    """Return the requests with new prompts, each of which begins with one of three prefixes.

    Prompts with the same prefix diverge within a KV block or at a block's end.
    """
    beginnings = reference.prompts(VOCAB_SIZE, [12, 16, 17], seed=5)
    return [
        attrs.evolve(request, prompt=[*beginnings[i % 3], *request.prompt[: 1 + i % 9]])
        for i, request in enumerate(asked)
    ]


def off_now_and_then(request: Any) -> bool:
    """Return whether drafting is turned off for a request: at a third of all sequence lengths."""
    is_off: bool = (request.num_tokens // 3 + request.seed) % 3 == 0
    return is_off


def run(
    model_dir: Path,
    asked: list[Asked],
    num_kv_blocks: int = 48,
    *,
    kv_manager: str = "paged",
    is_off: Callable[[Any], bool] | None = None,
    **speculative_config: Any,
) -> Outcome:
    """Run requests that arrive at random steps, and cancel some of them.

    The verifier is "chosen", with which outputs must equal those of plain decoding.

    is_off: a function that takes a request and returns whether drafting is turned off for it; None: drafting is never
        turned off.
    """
    journal = Journal()
    speculative_config = {"adaptive_draft_length": False, **speculative_config, "verifier": "chosen"}
    plugins: Any = RecordingPlugins(journal)
    settings = SETTINGS | {"num_kv_blocks": num_kv_blocks, "kv_manager": kv_manager}
    engine = LLM(str(model_dir), plugins=plugins, speculative_config=speculative_config, **settings).engine
    if is_off is not None:
        engine._speculation.drafters[0].observer.is_off = is_off
    rng, waiting, num_steps, num_preempted = np.random.default_rng(4), list(enumerate(asked)), 0, 0
    num_cached = 0
    texts: dict[str, list[int]] = {}
    index_of: dict[str, int] = {}
    cancelled: set[str] = set()

    def listen(request: Any, pieces: Any) -> None:
        if request.finish_reason is not None:
            texts[request.id] = request.token_ids.tolist()
            if request.finish_reason == "abort":
                cancelled.add(request.id)

    while waiting or engine.has_unfinished:
        for _ in range(min(int(rng.integers(0, 5)), len(waiting))):
            i, request = waiting.pop(0)
            request_id = engine.add_request(request.prompt, request.params, listen)
            index_of[request_id] = i
        oldest = [request_id for request_id in index_of if engine.is_unfinished(request_id)][:8]
        if oldest and rng.random() < 0.15:
            engine.cancel(oldest[rng.integers(len(oldest))])
        report = engine.step()
        num_preempted += report.num_preempted
        num_cached += report.num_cached_tokens
        num_steps += 1
    engine.kv.check_integrity()
    return Outcome(journal, texts, index_of, cancelled, num_steps, num_preempted, num_cached)


KNOWN: dict[tuple[Path, tuple[int, ...], SamplingParams], list[int]] = {}
"""(model folder, prompt, parameters) -> output without speculation, for all that any test asked for."""


def plain_outputs(model_dir: Path, asked: list[Asked]) -> list[list[int]]:
    """Return the outputs of plain decoding, in the order of `asked`."""
    keys = [(model_dir, tuple(each.prompt), attrs.evolve(each.params, num_speculative_tokens=None)) for each in asked]
    new = [key for key in dict.fromkeys(keys) if key not in KNOWN]
    if new:
        plugins: Any = RecordingPlugins(Journal())
        llm = LLM(str(model_dir), plugins=plugins, **SETTINGS | {"num_kv_blocks": 512, "max_num_batched_tokens": 512})
        prompts = [{"prompt_token_ids": list(prompt)} for _, prompt, _ in new]
        outputs = llm.generate(prompts, [params for _, _, params in new], use_tqdm=False)
        KNOWN.update((key, output.outputs[0].token_ids) for key, output in zip(new, outputs, strict=True))
    return [KNOWN[key] for key in keys]


def check_outputs(outcome: Outcome, asked: list[Asked], plain: list[list[int]]) -> None:
    """Assert that each output equals plain decoding's. The output of a cancelled request may end earlier."""
    for request_id, i in outcome.index_of.items():
        output = outcome.texts[request_id][len(asked[i].prompt) :]
        assert output == plain[i][: len(output)]
        assert len(output) == len(plain[i]) or request_id in outcome.cancelled


def save_talkative_model(folder: Path, certainty: float = 3, **config: Any) -> Path:
    """Save a target whose next token depends mostly on the last one, so that some draft tokens are accepted.

    certainty: a factor on the LM head's weights. The larger it is, the more certain are the target's predictions.
    """
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    save_tiny_model("llama", folder, **sizes | config)
    model = reference.load(folder)
    model.get_input_embeddings().weight.data *= 60
    model.get_output_embeddings().weight.data *= certainty
    model.save_pretrained(folder)
    return folder


@frozen(eq=False)
class Expected:
    """The draft that a proposer should have made, computed from scratch.

    draft_probs: for each node, the distribution that it was sampled from; None if the node was not sampled.
    is_clear: whether rounding errors are too small to change the draft.
    """

    token_ids: list[int]
    parents: list[int]
    draft_probs: list[torch.Tensor | None]
    is_clear: bool


def mismatches(
    outcome: Outcome,
    from_scratch: Callable[[Drafted, list[int]], Expected],
    num_compared: int,
    tolerance: float = 1e-4,  # of probabilities
) -> Iterator[str]:
    """Yield a message for each recorded draft that differs from the one computed from scratch.

    Only num_compared randomly chosen drafts are compared, and of these only those that rounding could not change.

    from_scratch: a function that takes a recorded draft and the token ids of the request's whole text, and returns the
        expected draft.
    tolerance: the largest allowed difference between probabilities.
    """
    trees = [drafted for drafted in outcome.journal.drafts if drafted.token_ids]
    order = np.random.default_rng(6).permutation(len(trees))[:num_compared]
    num_clear = 0
    for drafted in (trees[i] for i in order):
        expected = from_scratch(drafted, outcome.texts[drafted.request_id])
        if not expected.is_clear:
            continue
        num_clear += 1
        where = f"{drafted.request_id} at {len(drafted.history)} tokens"
        if (drafted.token_ids, drafted.parents) != (expected.token_ids, expected.parents):
            yield f"{where}: {drafted.token_ids} {drafted.parents}, not {expected.token_ids} {expected.parents}"
        elif [probs is None for probs in drafted.q] != [probs is None for probs in expected.draft_probs]:
            yield f"{where}: other nodes are sampled"
        else:
            both = zip(drafted.q, expected.draft_probs, strict=True)
            gaps = [float((q - probs).abs().max()) for q, probs in both if q is not None and probs is not None]
            if max(gaps, default=0.0) > tolerance:
                yield f"{where}: draft_probs differ by {max(gaps)}"
    assert num_clear > 0.9 * len(order), f"{num_clear} of {len(order)} drafts are clear: make fewer near ties"


def accepted_path(drafted: Drafted, text: list[int]) -> tuple[int, bool]:
    """Follow a request's text (token ids) down a recorded draft tree.

    Returns the number of draft tokens on the path, and whether the path ends at a leaf.
    """
    node, depth = -1, 0
    for token in text[len(drafted.history) :]:
        children = [j for j, parent in enumerate(drafted.parents) if parent == node]
        node = next((j for j in children if drafted.token_ids[j] == token), -2)
        if node == -2:
            break
        depth += 1
        if node not in drafted.parents:
            return depth, True
    return depth, False


def what_happened(outcome: Outcome) -> dict[str, int]:
    """Return how often each kind of event occurred in a run. Tests check these counts, since a run proves nothing about
    events that did not occur."""
    journal = outcome.journal
    paths = [(drafted, *accepted_path(drafted, outcome.texts[drafted.request_id])) for drafted in journal.drafts]
    return {
        "no draft": sum(not drafted.token_ids for drafted, _, _ in paths),
        "refused": sum(bool(drafted.token_ids) and not depth for drafted, depth, _ in paths),
        "accepted in part": sum(depth > 0 and not to_leaf for _, depth, to_leaf in paths),
        "accepted in full": sum(to_leaf for _, _, to_leaf in paths),
        "two or more accepted": sum(depth > 1 for _, depth, _ in paths),
        "preempted": outcome.num_preempted,
        "drafted after preemption": sum(drafted.was_reset for drafted, _, _ in paths),
        "cancelled": journal.reasons["abort"],
        "chunks": journal.num_chunks,
        "steps": outcome.num_steps,
    }
