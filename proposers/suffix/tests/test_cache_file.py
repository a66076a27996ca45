"""Tests that a cache file is either loaded completely or refused, and that a file that is not a cache is never
overwritten."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from suffix_driver import Driver

from specdec_core import ConfigError
from specdec_proposer_suffix.cache_file import UnusableFileError, load_sequences, save_sequences

OUTPUT = [10, 11, 12, 13, 14]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Fixture: a cache file that holds one output."""
    path = tmp_path / "some" / "cache"
    driver = Driver(cache_path=path)
    driver.run([1], OUTPUT)
    driver.proposer.close()
    return path


def test_outputs_outlive_the_engine(path: Path):
    driver = Driver(cache_path=str(path))
    assert driver.ask([10, 11]) == [12, 13]
    driver.run([1], [20, 21, 22])
    driver.proposer.close()
    assert [sequence.tolist() for sequence in load_sequences(path, 100)] == [OUTPUT, [20, 21, 22]]
    assert list(path.parent.iterdir()) == [path]


def test_the_oldest_are_dropped_where_fewer_may_be_kept(path: Path):
    save_sequences(path, [np.arange(i, i + 5) for i in (10, 20, 30)])
    driver = Driver(cache_path=path, max_cached_requests=2)
    assert [sequence[0] for sequence in driver.proposer.cache.sequences] == [20, 30]
    driver.run([1], OUTPUT)
    driver.proposer.close()
    assert len(load_sequences(path, 100)) == 3  # an engine that keeps fewer outputs drops none from the file


def test_engines_that_share_a_file_add_to_it(path: Path):
    first, second, idle, few = (Driver(cache_path=path, max_cached_requests=n) for n in (10, 10, 10, 1))
    first.run([1], [20, 21])
    second.run([1], [30, 31])
    few.run([1], [40, 41])
    for driver in (first, second, idle, few):
        driver.proposer.close()
    assert [sequence[0] for sequence in load_sequences(path, 100)] == [20, 30, 40]


def test_without_a_cache_the_file_stays(path: Path):
    content = path.read_bytes()
    with pytest.raises(ConfigError, match="suffix_decoding_cache_path has no effect: leave either out"):
        Driver(cache_path=path, max_cached_requests=0)
    assert path.read_bytes() == content


@pytest.mark.parametrize("lengths", [[3], [30, 5], [8, -3], [5, 0, 1]])
def test_lengths_that_do_not_add_up_are_refused(tmp_path: Path, lengths: list[int]):
    from safetensors.numpy import save_file

    from specdec_proposer_suffix.cache_file import FORMAT, _checksum

    tensors = {"token_ids": np.arange(5, dtype=np.int32), "lengths": np.array(lengths)}
    described = {"format": FORMAT, "crc32": str(_checksum(**tensors))}
    save_file(tensors, tmp_path / "cache", described)
    with pytest.raises(UnusableFileError, match="do not add up"):
        load_sequences(tmp_path / "cache", 100)


def test_every_truncation_is_refused_and_starts_empty(path: Path):
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UnusableFileError):
            load_sequences(path, 100)
    with pytest.warns(UserWarning, match=r"cache_path='.*cache' .* is neither used nor written to, .*: delete"):
        driver = Driver(cache_path=path)
    assert driver.ask([10, 11]) == []
    driver.run([1], OUTPUT)
    driver.proposer.close()
    assert path.read_bytes() == whole[:-1]  # a damaged file is not overwritten


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_byte_that_changed_is_noticed(path: Path, tmp_path: Path, place: int, flip: int):
    changed = bytearray(path.read_bytes())
    place %= len(changed)
    changed[place] ^= flip
    other = tmp_path / "changed"
    other.write_bytes(changed)
    try:
        found = [sequence.tolist() for sequence in load_sequences(other, 100)]
    except UnusableFileError:
        return
    assert found == [OUTPUT]  # a changed byte without effect, like white space in the header


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "cannot be read"), (b"some text of mine\n" * 50, "cannot be read")],
    ids=["empty", "text"],
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes, says: str):
    path = tmp_path / "mine.txt"
    path.write_bytes(content)
    with pytest.raises(UnusableFileError, match=says):
        load_sequences(path, 100)


def test_another_safetensors_file_is_refused(tmp_path: Path):
    from safetensors.numpy import save_file

    path = tmp_path / "model.safetensors"
    save_file({"weight": np.zeros(3, np.float32)}, path)
    with pytest.raises(UnusableFileError, match="is not a suffix cache"):
        load_sequences(path, 100)


def test_a_folder_is_refused(tmp_path: Path):
    with pytest.warns(UserWarning, match="is neither used nor written to"):
        Driver(cache_path=tmp_path)


def test_tokens_of_another_model_are_refused(path: Path):
    with pytest.warns(UserWarning, match="token ids up to 14, where the model's are below 12"):
        driver = Driver(cache_path=path, vocab_size=12)
    assert driver.proposer.cache.sequences == []


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path):
    driver = Driver(cache_path=tmp_path / "file" / "cache")
    (tmp_path / "file").write_text("")
    driver.run([1], OUTPUT)
    with pytest.warns(UserWarning, match="cannot be saved"):
        driver.proposer.close()


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    driver = Driver()
    driver.run([1], OUTPUT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        driver.proposer.close()
    assert list(tmp_path.iterdir()) == []


def test_no_sequences_are_a_cache_as_well(tmp_path: Path):
    save_sequences(tmp_path / "cache", [])
    assert load_sequences(tmp_path / "cache", 100) == []


def test_threads_that_share_a_file_lose_nothing(tmp_path: Path):
    drivers = [Driver(cache_path=tmp_path / "cache") for _ in range(4)]

    def work(driver: Driver, number: int) -> None:
        for i in range(20):
            driver.run([1], [number, i])
            driver.proposer.close()

    threads = [Thread(target=work, args=(driver, number)) for number, driver in enumerate(drivers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = sorted(tuple(sequence.tolist()) for sequence in load_sequences(tmp_path / "cache", 100))
    assert found == sorted((number, i) for number in range(4) for i in range(20))
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_link_and_its_permissions_stay(path: Path, tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(path)
    path.chmod(0o640)
    driver = Driver(cache_path=link)
    driver.run([1], [20, 21])
    driver.proposer.close()
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert len(load_sequences(path, 100)) == 2


def test_what_cannot_be_saved_does_not_pile_up(tmp_path: Path):
    driver = Driver(cache_path=tmp_path / "file" / "cache", max_cached_requests=5)
    (tmp_path / "file").write_text("")
    for _ in range(20):
        driver.run([1], OUTPUT)
    assert len(driver.proposer._saved._new) == 5


SAVES_FOR_EVER = """
import sys
from pathlib import Path

import numpy as np
from specdec_proposer_suffix.cache_file import save_sequences

while True:
    save_sequences(Path(sys.argv[1]), [np.arange(5_000_000)])
"""

ADDS_TWENTY = """
import sys
from pathlib import Path

import numpy as np
from specdec_proposer_suffix.cache_file import SavedCache

cache = SavedCache(Path(sys.argv[1]), 100, 1000)
print("ready", flush=True)
sys.stdin.readline()
for i in range(20):
    cache.add(np.array([int(sys.argv[2]), i]))
    cache.save()
"""


def test_what_a_killed_process_had_written_is_gone_with_the_next_save(path: Path):
    before, command = path.read_bytes(), [sys.executable, "-c", SAVES_FOR_EVER, path]
    for _ in range(20):  # now and then it is killed just after a save
        with subprocess.Popen(command) as process:
            while process.poll() is None and not _has_begun(path.parent):
                time.sleep(0.001)
            process.kill()
        if _has_begun(path.parent):
            break
    else:
        pytest.fail("it was never killed while it saved")
    assert path.read_bytes() == before or len(load_sequences(path, 5_000_000)) == 1
    save_sequences(path, [np.arange(3)])
    assert list(path.parent.iterdir()) == [path]
    assert [sequence.tolist() for sequence in load_sequences(path, 100)] == [[0, 1, 2]]


def _has_begun(folder: Path) -> bool:
    """Whether a save has begun: the folder has a temporary file that is not empty."""
    with suppress(FileNotFoundError):  # it was renamed meanwhile
        return any(each.stat().st_size for each in folder.glob(".*"))
    return False


def test_processes_that_share_a_file_lose_nothing(path: Path):
    command = [sys.executable, "-c", ADDS_TWENTY, path]
    processes = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in (1, 2, 3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
    found = sorted(tuple(sequence.tolist()) for sequence in load_sequences(path, 100)[1:])
    assert found == [(number, i) for number in (1, 2, 3) for i in range(20)]
    assert list(path.parent.iterdir()) == [path]
