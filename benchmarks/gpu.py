"""Measures what specdec does on a GPU, in less than 8 minutes: how near its kernels and its decoding come to the limits
of the device, what speculation gains, and whether it changes the output.

    python benchmarks/gpu.py            # writes benchmarks/results/gpu.json; needs a GPU of 80 GB
    python benchmarks/gpu.py --small    # a quick test, also on a CPU: small models and short runs
    python benchmarks/gpu.py --only kernels plain --minutes 4

The parts are `kernels`, `plain`, `speculation`, `equality` and `steps`; the module of each in benchmarks/on_gpu says
what it measures. Each runs in a process of its own, so that none takes another down, and has a share of the time: the
cells that it does not reach are noted as skipped. What fails is recorded with its error. The tables come last.

With --small the results go to gpu_small.json, and only show that the benchmark works: on a CPU, Triton's kernels run in
its interpreter, if it is installed.

The exit status is 1 if a row has an error or a part failed. The results are written all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from math import isfinite, nan
from pathlib import Path
from threading import Thread
from time import time
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

from attrs import asdict, frozen
from measuring import DISTRIBUTIONS, RESULTS, command, commit, machine, version_of, write
from on_gpu import equality, kernels, plain, speculation, steps
from on_gpu.setup import SMALL, Part, Setup, Sizes
from on_gpu.tables import table
from on_gpu.timing import DeviceIsDeadError, said

OURS = (*DISTRIBUTIONS, "specdec-proposer-eagle", "specdec-model-tiny")


@frozen
class Measured:
    """A part. goes_on: another process can measure what is left of it, if the device fails.

    rows: yields the results.
    columns: what the table shows.
    share: of the time.
    """

    rows: Part
    columns: Sequence[str]
    share: float
    goes_on: bool = False


# What each takes on an H100 is an estimate: none has run there yet.
PARTS = {
    "kernels": Measured(kernels.rows, kernels.COLUMNS, 0.13, goes_on=True),  # 60 s: 59 cells, and 30 s to compile
    "plain": Measured(plain.rows, plain.COLUMNS, 0.33),  # 20 s, and 20 to 40 s for each of transformers' cells
    "speculation": Measured(speculation.rows, speculation.COLUMNS, 0.36),  # 170 s: 18 engines of 4 s, 108 cells of 1 s
    "equality": Measured(equality.rows, equality.COLUMNS, 0.09),  # 40 s: 9 engines, 10,000 tokens each
    "steps": Measured(steps.rows, steps.COLUMNS, 0.09),  # 45 s: 6 engines, 8 cells of 3 s
}
NO_MEASUREMENT = "--small: these figures are no measurements; they only show that the benchmark works"
ENDED, DEAD = "its process ended with {}", 3
"""How a part's process ended: DEAD, if the device has failed for good."""
END_S = 15.0
"""What is left of the time when that of the last part is over: a part may be in a cell, and is stopped then."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--small", action="store_true", help="small models and short runs, to see whether it works")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=[*PARTS],
        metavar="PART",
        help=f"of {', '.join(PARTS)}",
    )
    parser.add_argument("--device", choices=devices, default=devices[0], help="default: %(default)s")
    parser.add_argument("--minutes", type=minutes, default=8.0, help="for all parts together; default: %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file; default: in benchmarks/results")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # a part's own process: where it writes
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # and until when
    args = parser.parse_args()
    if args.device == "cpu" and not args.small:
        parser.error("without a CUDA device only small models are measured: use --small")
    args.output = args.output or RESULTS / ("gpu_small.json" if args.small else "gpu.json")
    return args


def minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not (isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of minutes")
    return value


def main() -> None:
    args = arguments()
    sizes = SMALL if args.small else Sizes()
    if args.rows is not None:
        end_with_parent()
        if args.device == "cpu":
            torch.set_num_threads(1)  # nothing is large
        setup = Setup(sizes=sizes, device=args.device, until=args.until, done=read_rows(args.rows))
        run_part(args.only[0], setup, args.rows)
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the part, as Ctrl-C does
    record: dict[str, Any] = {
        "command": command("gpu.py"),
        "note": NO_MEASUREMENT if args.small else None,
        "commit": commit(),
        "machine": machine(OURS),
        "setup": {"device": args.device, "minutes": args.minutes, **asdict(sizes)},
        "seconds": {},
        "parts": {},
    }
    started = time()
    for name, until in deadlines(args.only, started, 60 * args.minutes).items():
        own = [sys.executable, __file__, "--only", name, "--device", args.device, "--until", str(until)]
        began = time()
        rows = rows_of([*own, *["--small"] * args.small], until + END_S, goes_on=PARTS[name].goes_on)
        record["machine"] |= rows.pop(0) if rows and "gpu" in rows[0] else {}
        record["parts"][name] = rows
        record["seconds"][name] = round(time() - began, 1)
        write(record, args.output)
        print(f"{name}: {len(rows)} rows in {record['seconds'][name]} s", file=sys.stderr, flush=True)
    for name, rows in record["parts"].items():
        print(f"\n{name}", *table(rows, PARTS[name].columns), sep="\n")
    if args.small:
        print(f"\n{NO_MEASUREMENT}")
    print(f"\n{time() - started:.0f} s; everything is in {args.output}")
    failed = [name for name, rows in record["parts"].items() if any("error" in row for row in rows)]
    if failed:
        raise SystemExit(f"there were errors in {', '.join(failed)}")


def deadlines(names: Sequence[str], started: float, seconds: float) -> dict[str, float]:
    """When the time of each part is over. What a part leaves goes to the next ones."""
    total, so_far, found = sum(PARTS[name].share for name in names), 0.0, {}
    for name in names:
        so_far += PARTS[name].share
        found[name] = started + (seconds - END_S) * so_far / total
    return found


def rows_of(own: Sequence[str], end: float, *, goes_on: bool = False) -> list[dict[str, Any]]:
    """Run a part in its own process, and stop it at `end`, in seconds of time(). Returns what it has written until
    then, and a row with the error if it did not end well.

    own: its command but for --rows.
    goes_on: if the device has failed, start another process for what is left.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, size = Path(folder) / "rows", -1
        file.touch()
        failed = run([*own, "--rows", str(file)], end)
        while failed == ENDED.format(DEAD) and goes_on and size < file.stat().st_size:
            size = file.stat().st_size
            failed = run([*own, "--rows", str(file)], end)
        rows = read_rows(file)
    return [*rows, {"error": failed}] if failed else rows


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The last line is left out if it was broken off."""
    whole, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def run(own: Sequence[str], end: float) -> str:
    """Run a command, and stop it at `end`. Returns what went wrong, or ""."""
    # It reads its input to learn that this process has ended.
    process = subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(max(1.0, end - time()))
        return ENDED.format(code) if code else ""
    except subprocess.TimeoutExpired:
        return "it was stopped: the time of this part is over"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile for it
            process.wait()
        process.stdin.close()


def end_with_parent() -> None:
    """Kill this part's process and those that compile for it once the process that started it has ended, however it
    did: then the pipe that is the input of this one is closed."""
    if os.getpgrp() != os.getpid():
        return  # started by hand

    def watch() -> None:
        os.read(0, 1)  # nothing is written; a buffered read would hold a lock when Python ends
        os.killpg(0, signal.SIGKILL)

    Thread(target=watch, daemon=True).start()


def run_part(name: str, setup: Setup, file: Path) -> None:
    """Write each row to the file as a line, those before them of what they were measured on."""
    with file.open("a", encoding="utf-8") as stream:

        def add(row: dict[str, Any]) -> None:
            stream.write(json.dumps(row) + "\n")
            stream.flush()

        try:
            if not setup.done:
                add(gpu(setup.device))
            for row in PARTS[name].rows(setup):
                add(row)
        except DeviceIsDeadError as error:
            add(error.row)
            raise SystemExit(DEAD) from error
        except Exception as error:
            add({"error": said(error)})


def gpu(device: str) -> dict[str, Any]:
    found = {"gpu": None, "cuda": None, "driver": None, "triton": version_of("triton") if find_spec("triton") else None}
    if device != "cuda":
        return found
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout if shutil.which(query[0]) else ""
    return {
        **found,
        "gpu": torch.cuda.get_device_name(),
        "gpu_bytes": torch.cuda.get_device_properties(0).total_memory,
        "cuda": torch.version.cuda,
        "driver": driver.partition("\n")[0] or None,
    }


if __name__ == "__main__":
    main()
