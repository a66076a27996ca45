"""Train the tiny model: warm-up, a stable phase, and a decay of the learning rate; resumes from its last checkpoint.

Files in the work folder: ``checkpoint.pt`` (latest), ``stable.pt`` (the last one before the decay, from which
a longer run can continue), ``loss.jsonl``, ``pid``. Creating a file named ``decay`` there begins the decay at once;
its content, when not empty, is the number of tokens the decay takes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from specdec_train.muon import Muon

from .data import BATCH_UNITS, UNIT, Units, spread_units
from .model import DTYPE, Trainee
from .state import Progress, reopen, restore, rewind, save, start_from, truncate_history

WARM_UP_STEPS = 100
STABLE_LENGTHS, DECAY_LENGTHS = ((0.6, 512), (1.0, 2048)), ((0.9, 1024), (1.0, 2048))
"""Lengths of the sequences in tokens, and up to which share of the stable phase, or of the decay, each is used. Shorter
ones cost less attention."""
LOG_EVERY, EVALUATE_EVERY = 10, 250
CHECKPOINT_SECONDS = 180
HELDOUT_UNITS = 16


def sequence_length(progress: Progress, stable_tokens: int) -> int:
    """Return the length of the next batch's sequences in tokens: short at first, full at the end.

    stable_tokens: number of training tokens before the decay.
    """
    if progress.decay_from is None:
        lengths, done = STABLE_LENGTHS, progress.tokens / stable_tokens
    else:
        lengths, done = DECAY_LENGTHS, (progress.tokens - progress.decay_from) / progress.decay_tokens
    return next((length for share, length in lengths if done < share), lengths[-1][1])


def rate(progress: Progress, end: float) -> float:
    """Return the learning rate of the next step as a share of its peak. end: what it is at the decay's end."""
    left = 1.0
    if progress.decay_from is not None:
        left -= (progress.tokens - progress.decay_from) / progress.decay_tokens
    return min(end + (1 - end) * max(left, 0.0), (progress.step + 1) / WARM_UP_STEPS)


def make_optimizers(trainee: Trainee, peak: float) -> list[torch.optim.Optimizer]:
    """Make the optimizers: Muon for the layers' matrices, AdamW for the embedding and the norms. peak: the highest
    learning rate."""
    layers = [w for name, w in trainee.masters.items() if w.ndim == 2 and "embed" not in name]
    others = [w for name, w in trainee.masters.items() if w.ndim != 2 or "embed" in name]
    return [
        Muon(layers, lr=peak, weight_decay=0.1, dtype=DTYPE),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.95), weight_decay=0.01, fused=True),
    ]


def heldout_loss(trainee: Trainee, path: Path) -> float:
    """Mean loss (nats per token) over HELDOUT_UNITS units spread evenly through a file of held-out token ids."""
    rows = spread_units(path, HELDOUT_UNITS)
    with torch.no_grad():
        return statistics.fmean(trainee.loss(part).item() for part in rows.view(-1, BATCH_UNITS, UNIT + 1))


def decay_due(work: Path, progress: Progress, stable_tokens: int, default: int) -> int | None:
    """Return the number of tokens that the learning rate decay takes if it is to begin now, else None.

    stable_tokens: the decay begins after this many training tokens, or as soon as the file ``decay`` exists in
        ``work``.
    default: the number of tokens that the decay takes, unless that file contains another number.
    """
    request = work / "decay"
    if request.exists():
        text = request.read_text().strip()
        return int(float(text)) if text else default
    return default if progress.tokens >= stable_tokens else None


def update(
    trainee: Trainee, optimizers: list[torch.optim.Optimizer], loss: torch.Tensor, learning_rate: float
) -> float:
    """Take one optimizer step on a batch's loss. Returns the loss."""
    torch.autograd.backward(loss)
    trainee.collect_gradients()
    torch.nn.utils.clip_grad_norm_(trainee.masters.values(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()
    trainee.sync()
    return loss.item()


def report(point: dict[str, Any], progress: Progress, tokens: int, step_seconds: float) -> None:
    """Print one line about the latest training steps: loss, speed, and the time left.

    point: the values just logged, such as `loss`.
    tokens: number of training tokens of the whole run.
    step_seconds: duration of a typical step.
    """
    end = tokens if progress.decay_from is None else progress.decay_from + progress.decay_tokens
    speed = BATCH_UNITS * UNIT / step_seconds
    print(
        f"{time.strftime('%H:%M:%S')} step {progress.step} {progress.tokens / 1e6:.2f}M tokens "
        f"loss {point['loss']:.4f} held-out {point.get('heldout', '-')} length {point['length']} "
        f"{speed:.0f} tok/s eta {(end - progress.tokens) / speed / 60:.0f} min",
        flush=True,
    )


def train(
    work: Path,
    tokens: int,
    decay_tokens: int,
    peak: float,
    end: float,
    start: Path | None = None,
    seen: int = 0,
    seed: int = 0,
) -> Progress:
    """Train the tiny model on ``tokens`` tokens. The learning rate decays over the last ``decay_tokens`` of these.

    work: folder of the corpus and the checkpoints.
    peak: the highest learning rate. end: the last one, as a share of it.
    start: folder of an exported model whose weights a new run begins with; None: random ones.
    seen: number of tokens that this model was trained on. They count as tokens of this run.
    """
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    (work / "pid").write_text(str(os.getpid()))
    trainee = Trainee(seed)
    stream = functools.cache(lambda name: Units(work / f"{name}.npy", seed))
    optimizers = make_optimizers(trainee, peak)
    progress = Progress()
    if (work / "checkpoint.pt").exists():
        progress = restore(work / "checkpoint.pt", trainee, optimizers)
        print(f"resumed at step {progress.step}, {progress.tokens / 1e6:.2f}M tokens", flush=True)
    elif start is not None:
        progress = start_from(start, trainee, seen)
    truncate_history(work / "loss.jsonl", progress.tokens)
    trainee.sync()
    durations: deque[float] = deque(maxlen=100)
    losses: list[float] = []
    saved = time.monotonic()
    bar = tqdm(total=tokens, initial=progress.tokens, unit="tok", unit_scale=True, disable=None)
    while progress.decay_from is None or progress.tokens < progress.decay_from + progress.decay_tokens:
        if progress.decay_from is None:
            due = decay_due(work, progress, tokens - decay_tokens, decay_tokens)
            if due is not None:
                save(work / "stable.pt", trainee, optimizers, progress)
                progress.decay_from, progress.decay_tokens = progress.tokens, due
        begun = time.monotonic()
        length = sequence_length(progress, tokens - decay_tokens)
        if progress.decay_from is None:
            batch = stream("train").batch(progress.units, length)
        else:
            batch = stream("decay").batch((progress.tokens - progress.decay_from) // UNIT, length)
        loss = trainee.loss(*batch)
        losses.append(update(trainee, optimizers, loss, peak * rate(progress, end)))
        progress.step += 1
        progress.units += BATCH_UNITS
        progress.tokens += BATCH_UNITS * UNIT
        durations.append(time.monotonic() - begun)
        # A run stopped by a signal for a while, or one that compiles, is not slow: count the usual step.
        typical = statistics.median(durations)
        progress.seconds += min(durations[-1], 4 * typical)
        bar.update(BATCH_UNITS * UNIT)
        if progress.step % LOG_EVERY == 0:
            point: dict[str, Any] = {"step": progress.step, "tokens": progress.tokens, "length": length}
            point |= {"loss": round(statistics.fmean(losses), 4), "rate": round(rate(progress, end), 4)}
            point |= {"seconds": round(progress.seconds, 1), "decays": progress.decay_from is not None}
            losses.clear()
            if progress.step % EVALUATE_EVERY == 0:
                point["heldout"] = round(heldout_loss(trainee, work / "heldout.npy"), 4)
            with (work / "loss.jsonl").open("a") as history:
                history.write(json.dumps(point) + "\n")
            report(point, progress, tokens, typical)
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            save(work / "checkpoint.pt", trainee, optimizers, progress)
            saved = time.monotonic()
    save(work / "checkpoint.pt", trainee, optimizers, progress)
    (work / "finished").write_text(json.dumps(asdict(progress)))
    bar.close()
    return progress


def parser() -> argparse.ArgumentParser:
    """Return the parser for the command-line options of a training run."""
    options = argparse.ArgumentParser(description="Train the tiny model; resumes from its last checkpoint.")
    options.add_argument("--work", type=Path, required=True, help="folder of the corpus and the checkpoints")
    options.add_argument("--tokens", type=float, default=18e6, help="tokens to train on")
    options.add_argument("--decay-tokens", type=float, default=3.2e6, help="tokens of the final decay")
    options.add_argument("--peak", type=float, default=3e-3, help="peak learning rate")
    options.add_argument("--end", type=float, default=0.02, help="last learning rate, as a share of the peak")
    options.add_argument("--start", type=Path, help="folder of an exported model to begin with")
    options.add_argument("--seen", type=float, default=0, help="tokens that this model was trained on")
    options.add_argument("--seed", type=int, default=0, help="of the order of the training data")
    options.add_argument("--rewind", action="store_true", help="continue a finished run from before its decay")
    options.add_argument("--reopen", action="store_true", help="continue a finished run after its decay")
    return options


def run(arguments: argparse.Namespace) -> None:
    """Train with the given command-line options; with --rewind, first go back to the checkpoint before the decay.
    With --reopen, a decayed run goes on, for which half the peak learning rate is enough."""
    if arguments.rewind:
        rewind(arguments.work)
    if arguments.reopen:
        reopen(arguments.work)
    numbers = int(arguments.tokens), int(arguments.decay_tokens), arguments.peak, arguments.end
    train(arguments.work, *numbers, arguments.start, int(arguments.seen), arguments.seed)


if __name__ == "__main__":
    run(parser().parse_args())
