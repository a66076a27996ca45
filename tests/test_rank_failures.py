"""What happens when a rank, or the process that drives the ranks, is killed, raises an exception or is interrupted. No
process is left in any case."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from specdec_core import LLM, ConfigError, DeviceError, SamplingParams, SpecdecError
from specdec_core.models.split_modules import Part
from specdec_core.ranks import sharing
from specdec_core.ranks.driver import Ranks

PROMPTS = ["import os", "def f(x):"]
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ENDS_WITHIN_S = 10  # once a rank has ended
STARTS_WITHIN_S = 300  # also on a busy machine


def is_alive(process_id: int) -> bool:
    """Whether a process runs: one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = monotonic() + seconds
    while not holds():
        assert monotonic() < deadline, f"not within {seconds} seconds"
        sleep(0.02)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ranks]]:
    """The ranks of the engines that a test makes. When the test has ended, none of their processes is left."""
    found: list[Ranks] = []

    def start(*args: Any) -> Ranks:
        found.append(Ranks(*args))
        return found[-1]

    monkeypatch.setattr(sharing, "Ranks", start)
    yield found
    for ranks in found:
        wait_until(lambda ranks=ranks: not any(map(is_alive, ranks.process_ids)), ENDS_WITHIN_S)


def make_llm(size: int = 2, **more: Any) -> LLM:
    settings = {"dtype": "float32", "max_model_len": 512, "num_kv_blocks": 128, "disable_log_stats": True, **more}
    return LLM("tiny", tensor_parallel_size=size, **settings)


def test_a_killed_rank_ends_all_requests_with_its_name(started):
    llm = make_llm(4)
    _, process_id, _ = started[0].process_ids
    killed: list[float] = []

    def kill() -> None:
        sleep(0.3)
        killed.append(monotonic())
        os.kill(process_id, signal.SIGKILL)

    threading.Thread(target=kill).start()
    with pytest.raises(
        DeviceError, match=r"rank 2 of 4 \(process \d+\) was ended by signal 9.*All requests were ended"
    ):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert monotonic() - killed[0] < ENDS_WITHIN_S
    assert not llm.is_healthy
    assert not llm.engine.has_unfinished
    with pytest.raises(DeviceError, match="rank 2 of 4"):
        llm.generate(PROMPTS, SHORT, use_tqdm=False)
    llm.close()


@pytest.mark.nightly
def test_a_rank_that_is_killed_between_requests_is_noticed_at_once(started):
    llm = make_llm()
    llm.generate(PROMPTS, SHORT, use_tqdm=False)
    assert llm.is_healthy
    os.kill(started[0].process_ids[0], signal.SIGKILL)
    wait_until(lambda: not llm.is_healthy, ENDS_WITHIN_S)
    assert "rank 1 of 2" in str(llm.engine.failure)
    with pytest.raises(DeviceError, match=r"rank 1 of 2 .* was ended by signal 9"):
        llm.generate(PROMPTS, SHORT, use_tqdm=False)
    llm.close()


def test_an_exception_of_a_rank_is_told_with_its_text(started):
    llm = make_llm()
    started[0].later("reserve", "nobody", 1, 1)
    with pytest.raises(DeviceError, match="rank 1 of 2 raised KeyError: 'nobody'"):
        llm.generate(PROMPTS, SHORT, use_tqdm=False)
    assert not llm.is_healthy
    llm.close()


@pytest.mark.nightly
def test_an_exception_of_rank_0_in_an_exchange_ends_the_engine(started, monkeypatch):
    llm = make_llm()
    with monkeypatch.context() as patch:
        patch.setattr(Part, "sum", lambda part, partial: 1 / 0)
        with pytest.raises(DeviceError, match="rank 0 of 2 raised ZeroDivisionError"):
            llm.generate(PROMPTS, SHORT, use_tqdm=False)
    assert not llm.is_healthy
    llm.close()


def test_an_interrupt_waits_until_the_ranks_are_in_step(started, monkeypatch):
    """Ctrl-C in the middle of a forward pass ends the requests, as without ranks, and the engine goes on."""
    llm = make_llm()
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SHORT, use_tqdm=False)]
    total, calls = Part.sum, iter([False] * 5 + [True])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(part: Part, partial: Any) -> Any:
        if next(calls, False):
            signal.raise_signal(signal.SIGINT)
        return total(part, partial)

    with monkeypatch.context() as patch:
        patch.setattr(Part, "sum", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, SHORT, use_tqdm=False)
    signal.signal(signal.SIGINT, before)
    assert llm.is_healthy
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SHORT, use_tqdm=False)] == expected
    llm.close()


@pytest.mark.nightly
def test_an_exchange_that_was_broken_off_all_the_same_ends_the_engine(started, monkeypatch):
    llm = make_llm()

    def broken_off(part: Part, partial: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Part, "sum", broken_off)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, SHORT, use_tqdm=False)
    with pytest.raises(DeviceError, match="rank 0 of 2 raised KeyboardInterrupt"):
        llm.generate(PROMPTS, SHORT, use_tqdm=False)
    llm.close()


def test_close_and_garbage_collection_end_the_ranks(started):
    llm = make_llm()
    assert not Path(started[0]._folder).exists()
    llm.close()
    assert not any(map(is_alive, started[0].process_ids))
    with pytest.raises(SpecdecError, match="was closed"):
        llm.generate(PROMPTS, SHORT, use_tqdm=False)
    llm = make_llm(speculative_config={"method": "eagle3", "num_speculative_tokens": 2})
    llm.generate(PROMPTS, SHORT, use_tqdm=False)
    ids = started[1].process_ids
    started.clear()
    del llm
    gc.collect()
    assert not any(map(is_alive, ids))


def test_an_engine_that_cannot_be_built_leaves_no_process(started):
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size=4 must be 1 or 2"):
        make_llm(speculative_config={"method": "draft_model", "draft_tensor_parallel_size": 4})
    with pytest.raises(ConfigError, match=r"a draft head drafts on one rank.*Give 1"):
        make_llm(speculative_config={"method": "eagle", "draft_tensor_parallel_size": 2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing.SharedKV, "__init__", lambda self, *args: 1 / 0)
        with pytest.raises(SpecdecError, match="ZeroDivisionError"):
            make_llm()
    assert len(started) == 1


SCRIPT = """
import os, signal, sys, tempfile, warnings
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background processes without it
from specdec_core import LLM, SamplingParams, SpecdecError
from specdec_core.ranks import sharing
from specdec_core.ranks.driver import Ranks

def start(*args):
    ranks = Ranks(*args)
    print(*ranks.process_ids, flush=True)
    return ranks

sharing.Ranks = start
if sys.argv[1] == "stands in a deleted folder":
    sys.path[:0] = ["", Path("elsewhere")]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
llm = LLM("tiny", tensor_parallel_size=2, dtype="float32", max_model_len=512, num_kv_blocks=128)
print("ready", flush=True)
params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
while sys.argv[1] == "runs":
    llm.generate(["import os"], params, use_tqdm=False)
if sys.argv[1] == "forks":
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # from Python 3.12 on
    forked = os.fork()
    if not forked:
        try:
            llm.generate(["import os"], params, use_tqdm=False)
        except SpecdecError as error:
            print(type(error).__name__, error, flush=True)
        llm.close()
        sys.exit(0)
    print("the fork has ended with status", os.waitpid(forked, 0)[1])
    llm.generate(["import os"], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    print("the parent goes on")
"""


@pytest.fixture
def script() -> Iterator[Callable[[str], tuple[Any, list[int]]]]:
    """Return a function that runs the script until it is ready, in a group of processes of its own. It returns the
    process and the process ids of its other ranks."""
    processes: list[Any] = []

    def run(what: str) -> tuple[Any, list[int]]:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        processes.append(process)
        ids = [int(each) for each in process.stdout.readline().split()]
        assert process.stdout.readline() == "ready\n"
        return process, ids

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def test_ranks_end_when_the_process_that_drives_them_is_killed(script):
    process, ids = script("runs")
    assert all(map(is_alive, ids))
    process.kill()
    wait_until(lambda: not any(map(is_alive, ids)), ENDS_WITHIN_S)


def test_control_c_ends_a_script_and_its_ranks(script):
    process, ids = script("runs")
    sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all processes of the group
    _, errors = process.communicate(timeout=STARTS_WITHIN_S)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    wait_until(lambda: not any(map(is_alive, ids)), ENDS_WITHIN_S)


def test_a_second_control_c_ends_ranks_that_hang(script):
    process, ids = script("runs")
    os.kill(ids[0], signal.SIGSTOP)
    sleep(0.5)
    process.send_signal(signal.SIGINT)
    sleep(1)
    assert process.poll() is None
    assert is_alive(ids[0])
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=STARTS_WITHIN_S)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    wait_until(lambda: not any(map(is_alive, ids)), ENDS_WITHIN_S)


def test_a_fork_leaves_the_ranks_to_its_parent(script):
    process, ids = script("forks")
    found, errors = process.communicate(timeout=STARTS_WITHIN_S)
    assert (process.returncode, errors) == (0, "")
    assert "SpecdecError" in found
    assert "is a fork" in found
    assert found.endswith("the fork has ended with status 0\nthe parent goes on\n")
    wait_until(lambda: not any(map(is_alive, ids)), ENDS_WITHIN_S)


@pytest.mark.nightly
def test_a_deleted_folder_and_odd_entries_of_sys_path_do_no_harm(script):
    process, _ = script("stands in a deleted folder")
    _, errors = process.communicate(timeout=STARTS_WITHIN_S)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.nightly
def test_a_script_that_does_not_close_its_llm_leaves_no_process(script):
    process, ids = script("ends")
    _, errors = process.communicate(timeout=STARTS_WITHIN_S)
    assert (process.returncode, errors) == (0, "")
    wait_until(lambda: not any(map(is_alive, ids)), ENDS_WITHIN_S)
