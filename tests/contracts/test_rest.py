"""Steps in a row in which no proposer is asked: what an observer stores of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ledger import LEDGER
from offered import Offered

from specdec_core.engine.observer import Observer


class Resting:
    """A request as an observer sees it."""

    def __init__(self, number: int, *, may_draft: bool = True) -> None:
        self.id, self.may_draft = f"request-{number}", may_draft
        self.token_ids, self.num_computed = np.arange(20), 15

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def may_use(self, method: str) -> bool:
        return True


@pytest.fixture
def observer(make_llm: Callable[..., Any]) -> Observer:
    llm = make_llm({"method": "ledger", "num_speculative_tokens": 2}, plugins=Offered(LEDGER))
    found: Observer = llm.engine._speculation.drafters[0].observer
    return found


def test_hidden_states_are_those_of_their_requests(observer: Observer) -> None:
    requests: Any = [Resting(0), Resting(1, may_draft=False), Resting(2)]
    passes = [{"input.1": torch.randn(3, 4)} for _ in range(5)]
    observer.put_off_plain(requests, [10, 10, 10], passes)
    for i in (0, 2):
        late = observer._arrears.take([requests[i]])
        assert late is not None
        assert late.starts == (10,)
        assert torch.equal(late.features["input.1"], torch.stack([each["input.1"][i] for each in passes]))
    assert observer._arrears.num_tokens == 0


def test_a_rest_ends_before_there_is_no_room_left(observer: Observer) -> None:
    requests: Any = [Resting(0), Resting(1)]
    observer._max_tokens, observer._room = 99, 7
    assert observer.num_alike(requests) == 7
    observer._room = 60
    assert observer.num_alike(requests) == 49
    observer.put_off_plain(requests, [10, 10], [{"input.1": torch.randn(2, 4)}] * 12)
    assert observer.num_alike(requests) == 37
    assert observer._room == 48
