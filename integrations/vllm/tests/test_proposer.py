"""The class that vLLM loads: its drafts, its errors, and that it is closed."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import numpy as np
import pytest
from vllm_stand_in import PersistentBatch, vllm_config

from specdec_core import ConfigError, PluginError, TokenRequest, resolve_model
from specdec_vllm import Proposer, rows
from specdec_vllm.rows import Rows


@pytest.fixture(autouse=True)
def ngram(monkeypatch):
    monkeypatch.setenv("SPECDEC_VLLM_PROPOSER", "ngram")
    monkeypatch.delenv("SPECDEC_VLLM_CONFIG", raising=False)


def propose(proposer: Proposer, texts: list[list[int]], num_new: list[int] | None = None) -> list[list[int]]:
    batch = PersistentBatch(8, 512)
    for row, text in enumerate(texts):
        batch.add(row, text)
    counts = num_new or [1] * len(texts)
    sampled = [text[len(text) - new :] for text, new in zip(texts, counts, strict=True)]
    return proposer.propose(sampled, batch.num_tokens, batch.token_ids, slot_mappings=None)


def test_a_chain_for_each_row():
    proposer = Proposer(vllm_config(num_speculative_tokens=3))
    proposer.load_model(object())
    texts = [[7, 8, 9, 1, 7, 8], [1, 2, 3], [5, 6, 5, 6]]
    assert propose(proposer, texts) == [[9, 1, 7], [], [5, 6, 5]]
    assert propose(proposer, texts[::-1], num_new=[0, 0, 0]) == [[], [], []]  # prompts that are still being computed
    assert propose(proposer, []) == []


def test_options(monkeypatch):
    monkeypatch.setenv("SPECDEC_VLLM_CONFIG", json.dumps({"prompt_lookup_min": 3}))
    assert propose(Proposer(vllm_config()), [[7, 8, 9, 1, 7, 8]]) == [[]]


def test_a_tree_is_cut_to_a_path(monkeypatch):
    monkeypatch.setenv("SPECDEC_VLLM_PROPOSER", "suffix")
    monkeypatch.setenv(
        "SPECDEC_VLLM_CONFIG", '{"suffix_decoding_use_tree": true, "suffix_decoding_max_spec_factor": 4}'
    )
    text = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]
    assert propose(Proposer(vllm_config()), [text])[0][:1] == [3]


def test_no_draft_passes_max_model_len():
    proposer = Proposer(vllm_config(num_speculative_tokens=4, max_model_len=9))
    assert propose(proposer, [[5, 6] * 3]) == [[5, 6]]  # and one more token of the target
    assert propose(proposer, [[5, 6] * 4, [5, 6] * 4 + [5]]) == [[], []]


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"PROPOSER": "ngarm"}, r"unknown proposer 'ngarm'. Did you mean 'ngram'\? Installed: .*suffix"),
        ({"PROPOSER": ""}, r"SPECDEC_VLLM_PROPOSER is not set: name an installed proposer, of .*ngram"),
        ({"CONFIG": "{prompt"}, r"SPECDEC_VLLM_CONFIG=\{prompt is not JSON"),
        ({"CONFIG": "[4]"}, r"SPECDEC_VLLM_CONFIG=\[4\] is not a JSON object"),
        ({"CONFIG": '{"prompt_lookup_mim": 4}'}, r"prompt_lookup_mim.*did you mean 'prompt_lookup_min'"),
        ({"CONFIG": '{"num_speculative_tokens": 4}'}, r"num_speculative_tokens in vLLM's speculative_config"),
        ({"PROPOSER": "prediction"}, r"'prediction' drafts from the `prediction` of a request, and vLLM"),
    ],
)
def test_what_is_refused(variables, says, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(f"SPECDEC_VLLM_{name}", value)
    with pytest.raises((ConfigError, PluginError), match=says):
        Proposer(vllm_config())


def test_a_proposer_that_observes_hidden_states_is_refused(monkeypatch):
    tiny = Path(resolve_model("tiny"))
    config = vllm_config()
    config.model_config.model, config.model_config.get_hidden_size = str(tiny), lambda: 256
    config.model_config.get_vocab_size = lambda: 8192
    monkeypatch.setenv("SPECDEC_VLLM_PROPOSER", "medusa")
    monkeypatch.setenv("SPECDEC_VLLM_CONFIG", json.dumps({"model": str(tiny / "drafts" / "medusa")}))
    with pytest.raises(ConfigError, match=r"'medusa' needs features of the target .*: ngram, .*suffix"):
        Proposer(config)


def test_the_number_is_needed():
    with pytest.raises(ConfigError, match="has no num_speculative_tokens: give"):
        Proposer(vllm_config(num_speculative_tokens=None))
    config = vllm_config()
    config.speculative_config.num_speculative_tokens_per_batch_size = [(1, 8, 2)]
    with pytest.raises(ConfigError, match="num_speculative_tokens_per_batch_size has no effect"):
        Proposer(config)


def test_outputs_are_saved_when_it_is_dropped(monkeypatch, tmp_path):
    path = tmp_path / "outputs"
    monkeypatch.setenv("SPECDEC_VLLM_PROPOSER", "suffix")
    monkeypatch.setenv("SPECDEC_VLLM_CONFIG", json.dumps({"suffix_decoding_cache_path": str(path)}))
    proposer = Proposer(vllm_config())
    propose(proposer, [[1, 2, 3, 4, 5]], num_new=[3])
    del proposer
    gc.collect()
    assert propose(Proposer(vllm_config()), [[3, 4]])[0] == [5]


class Told:
    """Hears which requests start and finish."""

    def __init__(self) -> None:
        self.running: list[str] = []

    def start(self, request: TokenRequest) -> None:
        self.running.append(request.id)

    def finish(self, request: TokenRequest, reason: str) -> None:
        self.running.remove(request.id)


def read(known: Rows, told: Told, *texts: list[int], num_new: int = 1) -> list[TokenRequest | None]:
    return known.read([np.array(text, dtype=np.int32) for text in texts], [num_new] * len(texts), told)


def test_few_that_have_left_are_remembered(monkeypatch):
    monkeypatch.setattr(rows, "MOST_AWAY", 3)
    known, told = Rows(2), Told()
    for i in range(20):
        read(known, told, [i, 1], [i, 2, 3])
        assert len(told.running) <= known.most_requests
    assert len(told.running) == 5
    (away,) = read(known, told, [18, 2, 3, 4])  # it left last but one
    assert away.num_prompt_tokens == 2
    (forgotten,) = read(known, told, [3, 1, 5])
    assert forgotten.num_prompt_tokens == 2
    known.clear(told)
    assert told.running == []


def test_a_text_that_was_taken_back_begins_anew():
    known, told = Rows(2), Told()
    (first,) = read(known, told, [1, 2, 3])
    (again,) = read(known, told, [1, 2, 3])  # another request with its prompt, in its row
    assert first is not again
    assert again.num_prompt_tokens == 2
    (other,) = read(known, told, [1, 2, 9, 4])
    assert other is not again
    assert other.token_ids.tolist() == [1, 2, 9, 4]


def test_rows_change_places():
    """Of two texts of one length that end alike."""
    known, told = Rows(2), Told()
    first, second = read(known, told, [1, 5, 6], [2, 5, 6])
    assert read(known, told, [2, 5, 6, 7], [1, 5, 6, 7]) == [second, first]
    assert (first.token_ids[0], second.token_ids[0]) == (1, 2)
    assert read(known, told, [1, 5, 6, 7, 8]) == [first]  # the other one ended, and the last row moved up


def test_the_next_turn_of_a_chat_is_a_new_request():
    known, told = Rows(2), Told()
    (first,) = read(known, told, [1, 2, 3])
    (second,) = read(known, told, [1, 2, 3, 9, 9, 4])
    assert second is not first
    assert second.num_prompt_tokens == 5


def test_one_that_was_preempted_comes_back():
    known, told = Rows(2), Told()
    first, second = read(known, told, [1, 2, 3], [7, 8])
    assert read(known, told, [7, 8, 9]) == [second]
    assert read(known, told, [7, 8, 9, 4], [1, 2, 3], num_new=0)[1] is None  # its tokens are computed again
    assert read(known, told, [1, 2, 3, 5]) == [first]
    assert first.num_prompt_tokens == 2


def test_tokens_of_steps_without_a_call_are_read_later():
    known, told = Rows(3), Told()
    first, second = read(known, told, [1, 2, 3], [1, 2, 3, 4])
    known.may_miss_a_step = True
    assert read(known, told, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4]) == [second, first]  # the longest that fits
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6])
    known.may_miss_a_step = False
    (third,) = read(known, told, [1, 2, 3, 4, 5, 6, 7, 8])
    assert third is not second
