"""Bad input is refused at once with an error that names the input and what is allowed. The engine keeps working.

More such tests are in core/tests: option values (test_validators.py, test_config.py, test_sampling_params.py), files
and the command line (test_config_file.py, test_cli_config.py, test_cli_check.py). How values are shown in errors is in
test_shown_values.py. Broken checkpoints and faulty
proposers are tested in tests/losslessness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from nested_values import nested

from specdec_core import LLM, CapacityError, ConfigError, PluginError, SamplingParams

GOOD = {"prompt_token_ids": [66, 312, 66, 312, 66, 312, 66]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def llm() -> LLM:
    settings = {"dtype": "float32", "max_model_len": 64, "num_kv_blocks": 16}
    return LLM("tiny", speculative_config={**NGRAM, "prompt_lookup_min": 1}, **settings)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    (output,) = LLM("tiny", dtype="float32", max_model_len=64).generate(GOOD, GREEDY)
    return output.outputs[0].token_ids


@pytest.fixture
def untouched(llm: LLM, expected: list[int]) -> Callable[[], Any]:
    """A context manager in which tests give bad input to the LLM while a request is running.

    At its end, the outputs of this request and of a new one must be right, and all blocks must be free.
    """

    @contextmanager
    def watch() -> Iterator[None]:
        finished: list[Any] = []
        llm.engine.add_request(GOOD["prompt_token_ids"], GREEDY, lambda request, pieces: finished.append(request))
        llm.engine.step()
        llm.engine.step()
        assert llm.engine.has_unfinished
        yield
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert finished[-1].output_token_ids == expected
        assert llm.generate(GOOD, GREEDY)[0].outputs[0].token_ids == expected
        llm.engine.kv.check_integrity()
        assert llm.engine.kv.num_free_blocks == 16

    return watch


def names(cases: list[tuple[Any, ...]]) -> list[str]:
    return [repr(case[0])[-60:] for case in cases]


def ids(token_ids: Any) -> dict[str, Any]:
    return {"prompt_token_ids": token_ids}


NOT_WHOLE = "not a list of one or more whole numbers"
OUTSIDE = "not in the vocabulary: allowed are 0 to 8191"
TOO_LONG = "leaves no room for output within max_model_len=64: shorten it, or raise max_model_len"
EITHER = r"give a string, \{'prompt': str\} or \{'prompt_token_ids': \[int, ...\]\}"
PROMPTS = [
    ("", ConfigError, "prompt '' has no tokens: give at least one character"),
    (None, ConfigError, "prompts=None is not understood: give one prompt, or a list"),
    (5, ConfigError, "prompts=5 is not understood"),
    (b"text", ConfigError, "prompts=b'text' is not understood"),
    ([5], ConfigError, f"prompt 5 is not understood: {EITHER}"),
    ([["text"]], ConfigError, EITHER),
    ("\ud800", ConfigError, "is not text: character 0 is half of a pair"),
    ({}, ConfigError, EITHER),
    ({"prompt": None}, ConfigError, EITHER),
    ({"prompt": "x", "prompt_token_ids": [1]}, ConfigError, EITHER),
    ({"promt": "x"}, ConfigError, "no key 'promt': did you mean 'prompt'"),
    ({"prompt_tokens_ids": [1]}, ConfigError, "did you mean 'prompt_token_ids'"),
    ({"prompt": "x", "multi_modal_data": 1}, ConfigError, "no key 'multi_modal_data'"),
    (ids([]), ConfigError, rf"prompt_token_ids=\[\] is {NOT_WHOLE}"),
    (ids(None), ConfigError, f"prompt_token_ids=None is {NOT_WHOLE}"),
    (ids(torch.ones(3, dtype=torch.int64, device="meta")), ConfigError, NOT_WHOLE),
    (ids("12"), ConfigError, NOT_WHOLE),
    (ids(12), ConfigError, NOT_WHOLE),
    (ids([1, None]), ConfigError, NOT_WHOLE),
    (ids(["1"]), ConfigError, NOT_WHOLE),
    (ids([1.0]), ConfigError, NOT_WHOLE),
    (ids([NAN]), ConfigError, NOT_WHOLE),
    (ids([True]), ConfigError, NOT_WHOLE),
    (ids([1, True]), ConfigError, rf"\[1, True\] is {NOT_WHOLE}"),
    (ids([[1, 2]]), ConfigError, NOT_WHOLE),
    (ids([[1], [1, 2]]), ConfigError, NOT_WHOLE),
    (ids({1, 2}), ConfigError, NOT_WHOLE),
    (ids(np.zeros((2, 2), dtype=np.int64)), ConfigError, NOT_WHOLE),
    (ids(np.array([1.0])), ConfigError, NOT_WHOLE),
    (ids(np.array([True])), ConfigError, NOT_WHOLE),
    (ids(np.array(["1"])), ConfigError, NOT_WHOLE),
    (ids(np.array([1, True], dtype=object)), ConfigError, NOT_WHOLE),
    (ids(torch.tensor([1.0])), ConfigError, NOT_WHOLE),
    (ids([-1]), ConfigError, rf"prompt token ids \[-1\] are {OUTSIDE}"),
    (ids([5, 8192]), ConfigError, rf"prompt token ids \[8192\] are {OUTSIDE}"),
    (ids([2**70]), ConfigError, rf"\[{2**70}\] are {OUTSIDE}"),
    (ids([-(2**70)]), ConfigError, rf"\[-{2**70}\] are {OUTSIDE}"),
    (ids(np.array([2**64 - 1], dtype=np.uint64)), ConfigError, OUTSIDE),
    (ids([1] * 64), CapacityError, f"a prompt of 64 tokens {TOO_LONG}"),
    ("word " * 200, CapacityError, f"a prompt of 201 tokens {TOO_LONG}"),
]


@pytest.mark.parametrize(("prompt", "error", "says"), PROMPTS, ids=names(PROMPTS))
def test_prompts(llm: LLM, untouched: Any, prompt: Any, error: type[Exception], says: str) -> None:
    """A bad prompt is refused. If it is the last one in a list, none of the prompts is run."""
    given = ["text", {"prompt_token_ids": [1]}, prompt] if isinstance(prompt, str | dict) else prompt
    with untouched(), pytest.raises(error, match=says) as caught:
        llm.generate(given, GREEDY)
    assert type(caught.value) is error


REQUESTS = [
    ({"num_speculative_tokens": 6}, "num_speculative_tokens=6 of a request exceeds the engine's 5: lower it"),
    ({"stop_token_ids": [3, 8192]}, rf"stop_token_ids \[8192\] are {OUTSIDE}"),
    ({"stop_token_ids": [2**70]}, rf"stop_token_ids \[{2**70}\] are {OUTSIDE}"),
    ({"allowed_token_ids": [3, 8192]}, rf"allowed_token_ids \[8192\] are {OUTSIDE}"),
    ({"logit_bias": {3: 1, 8192: 1}}, rf"logit_bias for token ids \[8192\] are {OUTSIDE}"),
    ({"logprobs": 8193}, "logprobs=8193 is more than the 8192 tokens of the vocabulary: lower it, or give -1 for all"),
    ({"prompt_logprobs": 8193}, "prompt_logprobs=8193 is more than the 8192 tokens"),
    ({"bad_words": [" "]}, "bad_words has ' ', and spaces before a word are ignored: give a word"),
    ({"allowed_token_ids": [9, 343], "bad_words": ["("]}, "bad_words forbid all that allowed_token_ids leave"),
    ({"allowed_token_ids": [5, 6], "stop_token_ids": [6, 5], "min_tokens": 1},
     "min_tokens=1, but every token that allowed_token_ids and bad_words leave ends the output: allow more tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("params", "says"), REQUESTS, ids=names(REQUESTS))
def test_sampling_params_that_do_not_suit_the_engine(llm: LLM, untouched: Any, params: dict, says: str) -> None:
    with untouched(), pytest.raises(ConfigError, match=says):
        llm.generate([GOOD, GOOD], [GREEDY, attrs.evolve(GREEDY, **params)])


ANOTHER_KIND = [
    ({"temperature": 0}, "sampling_params={'temperature': 0} must be a SamplingParams, or one for each prompt"),
    ([{}, GREEDY], r"sampling_params=\[\{\}, .* must be a SamplingParams, or one for each prompt"),
    ((GREEDY,), "1 sampling_params for 2 prompts: give one, or one for each"),
    (5, "sampling_params=5 must be a SamplingParams"),
    ("greedy", "sampling_params='greedy' must be a SamplingParams"),
]


@pytest.mark.parametrize(("params", "says"), ANOTHER_KIND, ids=names(ANOTHER_KIND))
def test_sampling_params_of_another_kind(llm: LLM, untouched: Any, params: Any, says: str) -> None:
    with untouched(), pytest.raises(ConfigError, match=says):
        llm.generate([GOOD, GOOD], params)


@pytest.mark.parametrize("flag", ["stream", "use_tqdm"])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_flags_of_generate(llm: LLM, untouched: Any, flag: str, value: Any) -> None:
    with untouched(), pytest.raises(ConfigError, match=f"{flag}={value!r} must be True or False"):
        llm.generate(GOOD, GREEDY, **{flag: value})


SAMPLING = [
    ({"temprature": 0}, "SamplingParams has no key 'temprature': did you mean 'temperature'"),
    ({"best_of": 2}, "no key 'best_of'"),
    *(({"temperature": value}, r"temperature=.* give a number in \[0.0, 100.0\]")
      for value in (-0.1, 101, NAN, INF, 10**400, None, "0.5", True, [0.5], np.array([0.5]))),
    *(({"top_p": value}, r"top_p=.* give a number in \(0.0, 1.0\]") for value in (0, -1, 1.01, NAN, None, "1", True)),
    *(({"top_k": value}, "top_k=.* give an integer from -1") for value in (-2, 2.5, NAN, INF, None, "5", True, 2**40)),
    *(({"max_tokens": value}, "max_tokens=.* give an integer from 1 to")
      for value in (0, -1, 1.5, INF, "16", True, [16], 2**40)),
    *(({"n": value}, "n=.* give an integer from 1 to 16384") for value in (-1, 1.5, None, "2", INF, 2**20)),
    *(({"seed": value}, "seed=.* give an integer from") for value in (2**63, -(2**63) - 1, 1.5, NAN, "1", True, [1])),
    *(({"stop": value}, "stop=.* must be a non-empty string or a list of them")
      for value in ("", ["a", ""], 5, [5], b"a", [["a"]], {"a"})),
    *(({"stop_token_ids": value}, "stop_token_ids=.* integers from 0 on")
      for value in ("5", "", b"5", {5: 1}, np.array(5), [NAN], [None], [[1]])),
    *(({"num_speculative_tokens": value}, "num_speculative_tokens=.* give an integer from 0 to 65536")
      for value in (-1, 1.5, NAN, "5", True, [5], 2**16 + 1)),
    *(({"ignore_eos": value}, "ignore_eos=.* must be True or False") for value in ("no", 1, None)),
    *(({"min_p": value}, r"min_p=.* give a number in \[0.0, 1.0\]")
      for value in (-0.1, 1.01, NAN, INF, None, "0.5", True, np.array([0.0, 1.0]))),
    *(({name: value}, rf"{name}=.* give a number in \[-2.0, 2.0\]")
      for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, NAN, INF, None, "1", True)),
    *(({"repetition_penalty": value}, r"repetition_penalty=.* give a number in \[1e-06, 1000000.0\]")
      for value in (0, -1, NAN, INF, None, "1", True)),
    *(({"min_tokens": value}, "min_tokens=.* give an integer from 0 to")
      for value in (-1, 1.5, None, "5", False, NAN, 2**40)),
    *(({"logit_bias": value}, "logit_bias=.* must be a dict from token ids, integers from 0 on, to numbers")
      for value in (5, "5", [(5, 1)], {"5": 1}, {-1: 1}, {1.5: 1}, {True: 1}, {None: 1}, {NAN: 1})),
    *(({"logit_bias": {5: value}}, r"logit_bias=\{5: .* is out of range: give numbers in \[-100, 100\]")
      for value in (100.1, -101, NAN, INF, None, "1", True, 10**400)),
    *(({"allowed_token_ids": value}, "allowed_token_ids=.* integers from 0 on")
      for value in (5, "5", [NAN], [None], [True], [-1], [1.5], ["5"])),
    *(({"bad_words": value}, "bad_words=.* must be a non-empty string or a list of them")
      for value in ("", ["a", ""], 5, [5], b"a", [["a"]], {"a"})),
    *(({name: ["a", "b\ud800"]}, rf"{name} has 'b\\ud800', which is not text: character 1 is half of a pair")
      for name in ("stop", "bad_words")),
    *(({name: value}, f"{name}=.* give an integer from -1 to") for name in ("logprobs", "prompt_logprobs")
      for value in (-2, 1.5, "5", True, NAN, [1])),
    *(({"logits_processors": value}, r"logits_processors=.* must be a list of callables \(logits, token_ids\)")
      for value in (5, print, [5], [None], "print", "", {"a": print})),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens=6 is more than max_tokens=5"),
]  # fmt: skip


@pytest.mark.parametrize(("params", "says"), SAMPLING, ids=names(SAMPLING))
def test_sampling_params(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SamplingParams(**params)


LONG, CHAT = "x" * 10**5, [{"role": "user", "content": "x"}]
TALL = {
    "prompts=": lambda llm: llm.generate({LONG}),
    "prompt ": lambda llm: llm.generate([[LONG]]),
    "cache_salt=": lambda llm: llm.generate({"prompt": "x", "cache_salt": [LONG]}),
    "messages=": lambda llm: llm.chat({LONG}),
    "messages ": lambda llm: llm.chat([LONG]),
    "chat_template_kwargs=": lambda llm: llm.chat(CHAT, chat_template_kwargs=[LONG]),
    "sampling_params=": lambda llm: llm.generate(GOOD, LONG),
    "use_tqdm=": lambda llm: llm.generate(GOOD, use_tqdm=LONG),
}


@pytest.mark.parametrize("name", TALL)
def test_of_a_long_value_the_beginning_is_shown(llm: LLM, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}.*xxx") as caught:
        TALL[name](llm)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids_of_thousands_of_digits(llm: LLM, untouched: Any, name: str) -> None:
    with untouched(), pytest.raises(ConfigError, match=f"{name} <list> are {OUTSIDE}"):
        llm.generate(GOOD, SamplingParams(**{name: [5, 10**5000]}))


KEYWORDS = [
    ({"max_num_seq": 4}, ConfigError, "LLM has no key 'max_num_seq': did you mean 'max_num_seqs'"),
    ({"model_path": "x"}, ConfigError, "no key 'model_path'"),
    ({"dtype": None}, ConfigError, "dtype=None is not known: give 'auto' or 'float32'"),
    ({"dtype": "int3"}, ConfigError, "dtype='int3' is not known"),
    ({"dtype": ["float32"]}, ConfigError, r"dtype=\['float32'\] is not known"),
    ({"runner": np.array(["auto", "x"])}, ConfigError, "runner=.* give 'auto' or 'generate'"),
    ({"max_model_len": 0}, ConfigError, "max_model_len=0 is too small: give an integer from 2"),
    ({"max_model_len": "64"}, ConfigError, "max_model_len='64' is text"),
    ({"max_model_len": 10**6}, ConfigError, "max_model_len=1000000 .* allows 2 to 2048"),
    ({"max_num_seqs": []}, ConfigError, r"max_num_seqs=\[\] is not a number"),
    ({"max_num_batched_tokens": 0}, ConfigError, "max_num_batched_tokens=0 is too small"),
    ({"block_size": True}, ConfigError, "block_size=True is a truth value"),
    ({"num_kv_blocks": 1.5}, ConfigError, "num_kv_blocks=1.5 is not an integer"),
    ({"num_kv_blocks": 1}, CapacityError, "1 KV blocks of 16 tokens .* which needs 128: .* raise num_kv_blocks"),
    ({"num_kv_blocks": 2**31 - 1}, CapacityError, "num_kv_blocks=2147483647 .* lower num_kv_blocks"),
    ({"gpu_memory_utilization": 0}, ConfigError, r"gpu_memory_utilization=0 is out of range: .* \(0, 1\]"),
    ({"tensor_parallel_size": 3}, ConfigError, "tensor_parallel_size=3 is not supported: give 1, 2 or 4"),
    ({"tensor_parallel_size": True}, ConfigError, "tensor_parallel_size=True is not supported: give 1, 2 or 4"),
    ({"tensor_parallel_size": np.array([1, 1])}, ConfigError, "tensor_parallel_size=.* give 1"),
    ({"trust_remote_code": "no"}, ConfigError, "trust_remote_code='no' must be True or False"),
    ({"skip_tokenizer_init": 1}, ConfigError, "skip_tokenizer_init=1 must be True or False"),
    ({"tokenizer": ""}, ConfigError, "tokenizer='' must be a folder or a name"),
    ({"tokenizer": 5}, ConfigError, "tokenizer=5 must be a folder or a name"),
    ({"skip_tokenizer_init": True, "tokenizer": "x"}, ConfigError, "loads no tokenizer, and tokenizer='x' would"),
    ({"skip_tokenizer_init": True, "tokenizer_mode": "slow", "tokenizer_revision": "v2"}, ConfigError,
     "and tokenizer_mode='slow' and tokenizer_revision='v2' would choose one: leave out the one or the other"),
    ({"plugins": []}, ConfigError, r"plugins=\[\] must be what Plugins.load\(\) returns"),
    ({"model": ["tiny"]}, ConfigError, r"model=\['tiny'\] must be a folder or a name"),
    ({"model": __file__}, ConfigError, "cannot be read: it is a file. Give a folder with"),
    ({"model": "no/such"}, ConfigError, r"model='no/such' cannot be read.* or an embedded model \(tiny\)"),
]  # fmt: skip


@pytest.mark.parametrize(("keywords", "error", "says"), KEYWORDS, ids=names(KEYWORDS))
def test_keywords(keywords: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"(?s){says}") as caught:
        LLM(**{"model": "tiny", **keywords})
    assert type(caught.value) is error


NUMBERS = (0, -1, 2.5, 5.0, NAN, INF, True, "5", [5], 2**16 + 1, 2**70)
SPECULATION = [
    (7, ConfigError, "speculative_config=7 must be the name of a method, or a dict such as"),
    ([("method", "ngram")], ConfigError, "or a dict such as"),
    ({}, ConfigError, r"names no method \(method=None\): give one that `spec-decode plugins` lists"),
    ({"metod": "medusa"}, ConfigError, "names no method, but has a key 'metod': did you mean 'method'?"),
    ({"modle": "x", "draft": 1}, ConfigError, "names no method, but has a key 'modle': did you mean 'model'?"),
    ({"model": __file__}, ConfigError, "the draft model '.*' is a file: give the folder that has it and its conf"),
    ({**NGRAM, "method": ["ngram", "ngram"]}, ConfigError, "names the method 'ngram' twice"),
    ({**NGRAM, "method": "ngrm"}, PluginError, "unknown proposer 'ngrm'. Did you mean 'ngram'"),
    *(({**NGRAM, "num_speculative_tokens": number}, ConfigError, "num_speculative_tokens=.* give an integer from 1 to")
      for number in NUMBERS),
    ({**NGRAM, "num_speculative_token": 3}, ConfigError, "did you mean 'num_speculative_tokens'"),
    ({**NGRAM, "prompt_lookup_maxx": 3}, ConfigError, "did you mean 'prompt_lookup_max'"),
    ({**NGRAM, 3: 4}, ConfigError, "has no key 3"),
    ({"method": "eagle", "max_model_len": 0}, ConfigError, "max_model_len=0 is too small"),
    ({**NGRAM, "model": "x"}, ConfigError, "no key 'model': the method takes no draft model"),
    ({**NGRAM, "prompt_lookup_min": 5, "prompt_lookup_max": 3}, ConfigError, "prompt_lookup_min=5 must be <= "),
    ({**NGRAM, "prompt_lookup_max": 10**30}, ConfigError, "prompt_lookup_max=.* is too large: give an integer from 1"),
    ({**NGRAM, "prompt_lookup_match": ["last"]}, ConfigError, r"prompt_lookup_match=\['last'\] .* give 'first' or"),
    ({**NGRAM, "disable_by_batch_size": "8"}, ConfigError, "disable_by_batch_size='8' is text"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "error", "says"), SPECULATION, ids=names(SPECULATION))
def test_speculative_config(config: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        LLM("tiny", speculative_config=config)
    assert type(caught.value) is error


def test_a_prompt_of_lists_in_lists_is_not_written_out(llm: LLM, untouched: Any) -> None:
    """A prompt of nested lists is refused without creating an array of its 9**9 values, or their text for the error
    message."""
    for prompt in (nested(9, 5), tuple(nested(8, (5,) * 9)), [1, 2, nested(9, 5)]):
        with untouched(), pytest.raises(ConfigError, match="is not a list of one or more whole numbers") as caught:
            llm.generate({"prompt_token_ids": prompt}, use_tqdm=False)
        assert len(str(caught.value)) < 400


def test_a_salt_that_is_no_text(llm: LLM, untouched: Any) -> None:
    with pytest.raises(ConfigError, match=r"cache_salt='\\ud800' has half of a character"):
        llm.generate({"prompt": "a", "cache_salt": "\ud800"}, use_tqdm=False)


def test_a_prompt_that_is_far_too_long_is_not_read(llm: LLM, untouched: Any) -> None:
    with pytest.raises(CapacityError, match="a prompt of 1000000000 tokens leaves no room"):
        llm.generate({"prompt_token_ids": range(10**9)}, use_tqdm=False)


def test_options_for_a_manager_that_has_none() -> None:
    with pytest.raises(ConfigError, match=r"'paged' has no key 'max_cached_blocks': remove it. There are none"):
        LLM("tiny", kv_manager_config={"max_cached_blocks": 4})
