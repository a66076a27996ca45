"""If a request's listener (callback) raises, cancels a request or calls the engine's step, no other request's output
changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from reference import NUM_TOKENS

from specdec_core import SamplingParams

pytestmark = pytest.mark.parametrize("model_dir", ["llama"], indirect=True, scope="session")
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def run(engine: Any) -> None:
    while engine.has_unfinished:
        engine.step()


def outputs_of(requests: dict[int, Any]) -> dict[int, list[int]]:
    return {i: request.output_token_ids for i, request in requests.items()}


def test_a_listener_that_raises_harms_nobody(model_dir: Any, make_llm: Any, prompts: list, references: list) -> None:
    engine = make_llm(model_dir, "ngram").engine
    finished: dict[int, Any] = {}
    raised = []

    def listen(index: int) -> Callable[..., None]:
        def listener(request: Any, pieces: Any) -> None:
            if index == 1 and not raised:
                raised.append(index)
                raise ZeroDivisionError("a bug in this listener")
            if request.finish_reason is not None:
                finished[index] = request

        return listener

    for i in range(4):
        engine.add_request(prompts[i], PARAMS, listen(i))
    with pytest.raises(ZeroDivisionError):
        run(engine)
    run(engine)
    assert outputs_of(finished) == dict(enumerate(references[:4]))


def test_a_listener_may_cancel_another_request_and_step(
    model_dir: Any, make_llm: Any, prompts: list, references: list
) -> None:
    engine = make_llm(model_dir, "ngram").engine
    finished: dict[int, Any] = {}
    ids: list[str] = []

    def listen(index: int) -> Callable[..., None]:
        def listener(request: Any, pieces: Any) -> None:
            if index == 0 and len(request.output_token_ids) > 3:
                engine.cancel(ids[2])
                engine.step()
            if request.finish_reason is not None:
                finished[index] = request

        return listener

    ids += [engine.add_request(prompts[i], PARAMS, listen(i)) for i in range(4)]
    run(engine)
    assert finished.pop(2).finish_reason == "abort"
    assert outputs_of(finished) == {i: references[i] for i in (0, 1, 3)}
    engine.kv.check_integrity()
