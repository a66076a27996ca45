"""`generate` returns the same with drafts as without: tokens, scores, cache, and what its helpers are called with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers_models import FAMILIES, generated, model_of, partly_wrong

from specdec_transformers import speculative

GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.95}
PENALIZED = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
DRAFT = {"method": "prediction", "num_speculative_tokens": 5}


class Processor(LogitsProcessor):
    """Records what it is called with. What it adds depends on how often it was called."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        return scores + torch.sin(torch.arange(scores.shape[-1]) * float(len(self.calls)))


class Criterion(StoppingCriteria):
    """Records what it is called with, and never holds."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores, **_):
        self.calls.append((input_ids.tolist(), len(scores)))
        return torch.zeros(1, dtype=torch.bool)


class Puts:
    """A streamer that records what it gets."""

    def __init__(self):
        self.puts = []

    def put(self, value):
        self.puts.append(value.tolist())

    def end(self):
        self.puts.append("end")


def compare(model, prompt, share=0.3, seed=0, **keywords):
    """Generate without and with drafts from a prediction that is partly wrong, and compare all that is seen of it."""
    keywords = {"max_new_tokens": 40, "return_dict_in_generate": True, "output_scores": True, **keywords}
    keywords |= {"output_logits": True}
    results, seen = [], []
    for number in (0, 5):
        puts, processor, criterion = Puts(), Processor(), Criterion()
        helpers = {
            "streamer": puts,
            "logits_processor": LogitsProcessorList([processor]),
            "stopping_criteria": StoppingCriteriaList([criterion]),
        }
        if number:
            output = results[0].sequences[0, prompt.shape[1] :].tolist()
            faster = speculative(DRAFT)
            helpers |= {"custom_generate": faster, "prediction": [*partly_wrong(output, share, seed), *range(9)]}
        results.append(generated(model, prompt, seed, **keywords, **helpers))
        seen.append((puts.puts, processor.calls, criterion.calls))
    plain, drafted = results
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert seen[1] == seen[0]
    for name in ("scores", "logits"):
        assert len(drafted[name]) == len(plain[name])
        torch.testing.assert_close(torch.cat(drafted[name]), torch.cat(plain[name]), atol=1e-3, rtol=1e-3)
    assert drafted.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
    assert faster.num_forward_passes == len(plain.scores) - faster.counts.num_accepted
    return plain, drafted, faster.counts


@pytest.mark.parametrize("how", [GREEDY, SAMPLED | PENALIZED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, how, prompt):
    plain, drafted, counts = compare(model_of(family), prompt, **how)
    assert 5 < counts.num_accepted < counts.num_draft_tokens - 5
    # The cache is that of plain decoding: generating goes on from it with the same text.
    if family != "lfm2":  # whose convolutions do not go on from a cache
        model, text = model_of(family), plain.sequences
        rest = [generated(model, text, max_new_tokens=9, past_key_values=r.past_key_values) for r in (plain, drafted)]
        assert rest[1].tolist() == rest[0].tolist()


@settings(deadline=None, max_examples=20)
@given(
    prompt=st.lists(st.integers(0, 59), min_size=1, max_size=12),
    share=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    seed=st.integers(0, 99),
    max_new_tokens=st.integers(1, 20),
    how=st.sampled_from([GREEDY, SAMPLED, SAMPLED | PENALIZED]),
    eos_token_id=st.lists(st.integers(0, 59), max_size=4),
)
def test_any_prompt_and_stop(llama, prompt, share, seed, max_new_tokens, how, eos_token_id):
    stops = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id or None, "pad_token_id": 0}
    compare(llama, torch.tensor([prompt]), share, seed, **how, **stops)


def test_a_stop_within_accepted_tokens(llama, prompt):
    (text,) = compare(llama, prompt)[0].sequences.tolist()
    eos = text[30]
    first = text.index(eos, prompt.shape[1])
    result, drafted, counts = compare(llama, prompt, share=0.0, eos_token_id=eos, pad_token_id=0)
    assert drafted.sequences.tolist() == [text[: first + 1]]
    assert counts.num_accepted > 0
    assert result.past_key_values.get_seq_length() == first
    last, of_plain = drafted.past_key_values.layers[-1].keys, result.past_key_values.layers[-1].keys
    torch.testing.assert_close(last, of_plain, atol=1e-4, rtol=1e-4)


def test_a_stopping_criterion_of_the_user(llama, prompt):
    class Long(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return torch.full((1,), input_ids.shape[1] >= 17)

    (plain,) = generated(llama, prompt, max_new_tokens=20)
    drafted = generated(
        llama,
        prompt,
        max_new_tokens=20,
        stopping_criteria=StoppingCriteriaList([Long()]),
        custom_generate=speculative(DRAFT),
        prediction=plain[prompt.shape[1] :],
    )
    assert drafted.tolist() == [plain[:17].tolist()]


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "bloom"])
def test_padding_and_masks(family, prompt):
    """A prompt with padding on its left, which the mask hides."""
    model = model_of(family)
    padded = torch.cat([torch.tensor([[3, 3, 3]]), prompt], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    compare(model, padded, attention_mask=mask)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(attention, prompt):
    compare(model_of("mistral", attn_implementation=attention), prompt)


def test_chunks_of_a_prompt(llama, prompt):
    compare(llama, prompt, prefill_chunk_size=4)


def test_up_to_the_last_position(prompt):
    """gpt2 has an embedding for each position: a draft that went further would fail."""
    compare(model_of("gpt2", n_positions=30), prompt, share=0.0, max_new_tokens=21)
