"""How ranks wait for an exchange. Between GPUs nothing can run here, so a stand-in records how it is asked to wait."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define, field

from specdec_core.ranks import group


@define
class Recording:
    """A process group, and the work that it returns."""

    waited: list[tuple[Any, ...]] = field(factory=list)

    def allgather(self, outputs: Any, inputs: Any) -> Recording:
        outputs[0][0].copy_(inputs[0])
        return self

    def wait(self, *limits: timedelta) -> None:
        self.waited.append(limits)


@pytest.mark.parametrize(("device", "expected"), [("cuda", ()), ("cpu", (group.SIGNALS_AFTER,))])
def test_only_exchanges_on_the_host_are_waited_for_with_a_limit(
    device: str, expected: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit, NCCL would stop the host, and end what takes longer."""
    recording = Recording()
    for name in ("_between_gpus", "_over_loopback"):
        monkeypatch.setattr(group, name, lambda *_: recording)
    part = group.join(str(tmp_path / "file"), 0, 1, torch.device(device))
    assert torch.equal(part.sum(torch.ones(3)), torch.ones(3))
    assert recording.waited == [expected]
