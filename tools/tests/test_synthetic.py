"""The proposer `synthetic`: its drafts are accepted at the given rates, and the output is that of plain decoding."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specdec_core import LLM, ConfigError, SamplingParams
from specdec_tools.compare import ListeningPlugins
from specdec_tools.synthetic import KnownOutputs, Synthetic, SyntheticConfig, num_right, spec

PROMPT = (5, 6)
OUTPUT = tuple(range(10, 40))


def request(*given: int, prompt: tuple[int, ...] = PROMPT) -> SimpleNamespace:
    return SimpleNamespace(id="r", num_prompt_tokens=len(prompt), token_ids=np.array([*prompt, *given]))


def proposer(*rates: float, output: tuple[int, ...] = OUTPUT) -> Synthetic:
    context = SimpleNamespace(target=SimpleNamespace(vocab_size=41), device=torch.device("cpu"))
    return Synthetic(KnownOutputs({PROMPT: output}), SyntheticConfig(rates), context)


def draft(proposer: Synthetic, request: SimpleNamespace, most: int = 9) -> list[int]:
    batch = SimpleNamespace(requests=[request], max_draft_tokens=(most,))
    return proposer.propose(batch).token_ids.tolist()


def test_the_number_of_right_tokens_has_the_rates() -> None:
    """Of 100 equally spaced numbers, 75 are below 0.75 and 25 below 0.25."""
    numbers = [num_right((0.75, 0.25, 0.25), i / 100) for i in range(100)]
    assert [sum(number > position for number in numbers) for position in range(3)] == [75, 25, 25]
    assert (num_right((1.0,), 0.999), num_right((0.0,), 0.0)) == (1, 0)


@pytest.mark.parametrize(("rate", "drafted"), [(1.0, [12, 13, 14]), (0.0, [13, 14, 15])])
def test_right_tokens_are_the_known_ones_and_others_are_wrong(rate: float, drafted: list[int]) -> None:
    made = proposer(rate, rate, rate)
    made.start(request())
    assert draft(made, request(10, 11)) == drafted
    assert draft(made, request(10, 11), most=2) == drafted[:2]
    assert draft(made, request(*OUTPUT[:-1])) == [39 if rate else 40]
    assert draft(made, request(*OUTPUT)) == []


def test_a_wrong_token_is_in_the_vocabulary() -> None:
    made = proposer(0.0, output=(40, 40))
    made.start(request())
    assert draft(made, request()) == [0]


def test_of_an_unknown_prompt_nothing_is_drafted() -> None:
    made = proposer(1.0)
    made.start(request(prompt=(1,)))
    assert draft(made, request(10, prompt=(1,))) == []
    made.finish(request(), "stop")
    made.finish(request(), "stop")


@pytest.mark.parametrize("rates", [(), (0.5, 0.6), (1.1,), (-0.1,), ("x",), None, (float("nan"),)])
def test_wrong_rates(rates: object) -> None:
    with pytest.raises(ConfigError, match="synthetic_acceptance_rates="):
        SyntheticConfig(rates)


def test_an_engine_accepts_at_the_rates(checkpoint: object) -> None:
    """The prompts' outputs are those of plain decoding, and of about 600 drafts the share that is accepted up to each
    position is near the given one."""
    prompts = [{"prompt_token_ids": [7 + i, 8, 9]} for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=200)
    with LLM(checkpoint, dtype="float32") as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    known = KnownOutputs()
    known.remember([p.prompt_token_ids for p in plain], [p.outputs[0].token_ids for p in plain])
    config = {"method": "synthetic", "num_speculative_tokens": 3, "synthetic_acceptance_rates": [0.8, 0.5, 0.1]}
    plugins = ListeningPlugins.load()
    plugins.own["synthetic"] = spec(known)
    with LLM(checkpoint, dtype="float32", speculative_config=config, plugins=plugins) as llm:
        drafted = llm.generate(prompts, params, use_tqdm=False)
    assert [d.outputs[0].token_ids for d in drafted] == [p.outputs[0].token_ids for p in plain]
    counts = sum((d.speculation for d in drafted[1:]), drafted[0].speculation)
    assert counts.num_drafts > 400
    assert counts.acceptance_rate_per_pos == pytest.approx([0.8, 0.5, 0.1], abs=0.06)
