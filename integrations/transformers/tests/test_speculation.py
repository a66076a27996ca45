"""A speculation over several calls of `generate`, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    StaticCache,
    StoppingCriteriaList,
    StopStringCriteria,
    T5Config,
    T5ForConditionalGeneration,
    TextStreamer,
)
from transformers.utils import logging
from transformers_models import LATENT, generated, model_of

from specdec_core import ConfigError, Draft, Plan, PluginError, Plugins, Proposer, ProposerSpec, resolve_model
from specdec_transformers import speculative

DRAFT = {"num_speculative_tokens": 6}
CODE = "def mean(values):\n    return sum(values) / len(values)\n\n\ndef mean("


@pytest.fixture(scope="module")
def tiny():
    """The embedded model and its tokenizer."""
    path = resolve_model("tiny", Plugins.load().models)
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # its checkpoint has an MTP head, which transformers does not use
    logging.disable_progress_bar()
    try:
        yield AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}], ids=str)
def test_the_embedded_model(tiny, method, how):
    model, tokenizer = tiny
    inputs = tokenizer(CODE, return_tensors="pt")
    faster, keywords = speculative({"method": method, **DRAFT}), {"max_new_tokens": 64, **inputs, **how}
    del keywords["input_ids"]
    plain = generated(model, inputs.input_ids, **keywords)
    for _ in range(2):
        assert generated(model, inputs.input_ids, custom_generate=faster, **keywords).tolist() == plain.tolist()
        assert faster.counts.num_accepted > 0
        assert faster.num_forward_passes == plain.shape[1] - inputs.input_ids.shape[1] - faster.counts.num_accepted


def test_suffix_learns_from_earlier_calls(llama, prompt, tmp_path):
    path = tmp_path / "outputs.cache"
    config = {"method": "suffix", "suffix_decoding_cache_path": str(path), **DRAFT}
    plain = generated(llama, prompt, max_new_tokens=40)

    def accepted(by):
        assert generated(llama, prompt, max_new_tokens=40, custom_generate=by).tolist() == plain.tolist()
        return by.counts.num_accepted

    with speculative(config) as faster:
        first = accepted(faster)
        assert accepted(faster) > first + 10
        faster.forget()
        assert accepted(faster) == first
    assert path.exists()
    assert accepted(speculative(config)) > first + 10
    assert accepted(faster) > first + 10  # built anew, after it was closed


def test_text_streamer_and_prediction_as_tensor(tiny, capsys):
    model, tokenizer = tiny
    inputs = tokenizer(CODE, return_tensors="pt")
    plain = model.generate(**inputs, max_new_tokens=20)
    faster = speculative({"method": "prediction"})
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    new = plain[0, inputs.input_ids.shape[1] :]
    model.generate(**inputs, max_new_tokens=20, custom_generate=faster, streamer=streamer, prediction=new)
    assert capsys.readouterr().out == tokenizer.decode(new) + "\n"
    assert faster.num_forward_passes < 8


def test_stop_strings(tiny):
    model, tokenizer = tiny
    inputs = tokenizer(CODE, return_tensors="pt")
    stops = {"stop_strings": ["return", "if"], "tokenizer": tokenizer, "max_new_tokens": 40}
    plain, faster = model.generate(**inputs, **stops), speculative({"method": "prediction"})
    assert plain.shape[1] < inputs.input_ids.shape[1] + 40
    with pytest.raises(ValueError, match="stop strings"):  # of transformers, which keeps the tokenizer to itself
        model.generate(**inputs, **stops, custom_generate=faster)
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, stops["stop_strings"])])
    keywords = {
        "max_new_tokens": 40,
        "stopping_criteria": criteria,
        "prediction": plain[0, inputs.input_ids.shape[1] :],
    }
    assert model.generate(**inputs, **keywords, custom_generate=faster).tolist() == plain.tolist()
    assert faster.counts.num_accepted > 0


REFUSED = {
    "beams": ({"num_beams": 2}, "beam_search"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
    "assistant": ({"assistant_model": None}, "assisted_generation"),
    "contrastive": ({"penalty_alpha": 0.5, "top_k": 4}, "contrastive_search"),
    "several": ({"num_return_sequences": 2, "do_sample": True}, "2 sequences are generated at once"),
    "no cache": ({"use_cache": False}, "type NoneType"),
    "static cache": ({"cache_implementation": "static"}, "type StaticCache"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions of rejected"),
    "hidden states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states of"),
    "synced": ({"synced_gpus": True}, "synced_gpus=True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(llama, prompt, name):
    keywords, says = REFUSED[name]
    if "assistant_model" in keywords:
        keywords = {"assistant_model": llama}
    faster = speculative({"method": "ngram", **DRAFT})
    with pytest.raises(ConfigError, match=says):
        llama.generate(prompt, max_new_tokens=4, custom_generate=faster, **keywords)


def test_refused_inputs(llama, prompt):
    faster = speculative({"method": "ngram", **DRAFT})
    with pytest.raises(ConfigError, match="2 sequences are generated at once"):
        llama.generate(prompt.repeat(2, 1), max_new_tokens=4, custom_generate=faster)
    embedded = llama.get_input_embeddings()(prompt)
    with pytest.raises(ConfigError, match="inputs_embeds leave no tokens"):
        llama.generate(inputs_embeds=embedded, max_new_tokens=4, custom_generate=faster)
    cache = StaticCache(llama.config, max_cache_len=32)
    with pytest.raises(ConfigError, match="type StaticCache"):
        llama.generate(prompt, past_key_values=cache, max_new_tokens=4, custom_generate=faster)


def test_refused_models(prompt):
    sparse = model_of("deepseek_v32", **LATENT, index_n_heads=2, index_head_dim=16, index_topk=8)
    config = T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    t5 = T5ForConditionalGeneration(config)
    for model, says in {
        model_of("qwen3_next"): "recurrent layers",
        sparse: "sparse attention",
        t5: "an encoder",
    }.items():
        with pytest.raises(ConfigError, match=says):
            model.generate(prompt, max_new_tokens=4, custom_generate=speculative({"method": "ngram", **DRAFT}))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"method": "ngram", **DRAFT, "prompt_lookup_maxx": 3}, "prompt_lookup_max"),
        ({"method": "ngram", **DRAFT, "adaptive_draft_length": True}, "adaptive_draft_length=True"),
        ({"method": ["ngram", "suffix"], **DRAFT}, "2 methods are combined by LLM only"),
    ],
)
def test_refused_options(llama, prompt, config, says):
    with pytest.raises(ConfigError, match=says):
        llama.generate(prompt, max_new_tokens=4, custom_generate=speculative(config))


def test_refused_predictions(llama, prompt):
    with pytest.raises(ConfigError, match="'ngram' does not draft from a prediction"):
        generated(
            llama, prompt, max_new_tokens=4, custom_generate=speculative({"method": "ngram", **DRAFT}), prediction=[1]
        )
    with pytest.raises(ConfigError, match=r"prediction has the shape \[1, 9\]"):
        generated(llama, prompt, max_new_tokens=4, custom_generate=speculative("prediction"), prediction=prompt)


def test_methods_that_need_the_target(tiny):
    model, tokenizer = tiny
    inputs = tokenizer(CODE, return_tensors="pt")
    with pytest.raises(ConfigError, match=r"'mtp' needs features of the target.*LLM\(model.*ngram, .*suffix"):
        model.generate(**inputs, custom_generate=speculative({"method": "mtp", **DRAFT}), max_new_tokens=4)


def test_one_model_for_each(llama, prompt):
    faster = speculative({"method": "ngram", **DRAFT})
    generated(llama, prompt, max_new_tokens=4, custom_generate=faster)
    with pytest.raises(ConfigError, match="make one for each model"):
        generated(model_of("llama", vocab_size=70), prompt, max_new_tokens=4, custom_generate=faster)


def test_one_call_at_a_time(llama, prompt):
    faster = speculative({"method": "ngram", **DRAFT})

    class Nested:
        def put(self, value):
            if value.numel() == 1:
                with pytest.raises(ConfigError, match="make one for each thread"):
                    llama.generate(prompt, max_new_tokens=2, custom_generate=faster)

        def end(self):
            pass

    llama.generate(prompt, max_new_tokens=2, custom_generate=faster, streamer=Nested())


class Failing(Proposer):
    """Fails at its third draft, and records how requests end."""

    def __init__(self):
        self.num_drafts, self.ends = 0, []

    def propose(self, batch):
        self.num_drafts += 1
        if self.num_drafts == 3:
            raise RuntimeError("a fault")
        return Draft.from_chains([[1]])

    def finish(self, request, reason):
        self.ends.append((len(request.token_ids), reason))


@frozen
class NoOptions:
    pass


class Only(Plugins):
    """Has one proposer, `failing`."""

    def __init__(self):
        super().__init__(())
        self.proposer_made = Failing()

    def proposer(self, name):
        plan = Plan(observes=False)
        return ProposerSpec(name, NoOptions, lambda *_: self.proposer_made, api=1, plan=lambda *_: plan)


def test_requests_end_whatever_happens(llama, prompt):
    plugins = Only()
    faster = speculative({"method": "failing", **DRAFT}, plugins=plugins)
    with pytest.raises(PluginError, match="'failing' failed"):
        generated(llama, prompt, max_new_tokens=20, custom_generate=faster)
    generated(llama, prompt, max_new_tokens=20, custom_generate=faster)
    text = generated(llama, prompt, max_new_tokens=20)
    eos = text[0, -1].item()
    generated(llama, prompt, max_new_tokens=60, eos_token_id=eos, pad_token_id=0, custom_generate=faster)
    (_, first), second, (_, third) = plugins.proposer_made.ends
    assert (first, second, third) == ("error", (29, "length"), "stop")
