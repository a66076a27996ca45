"""Compares the speed of proposers that need no model, in microseconds per request and step, on the same token streams.

    python benchmarks/proposers.py         # writes benchmarks/results/proposers.json and proposers.png

The proposers ("peers") are specdec's `suffix` and `ngram`, arctic-inference's suffix decoding, vLLM's n-gram proposer
and transformers' prompt lookup. A token stream is a source file of Python's standard library, tokenized for the
embedded model. A request replays such a stream as a target model's output: in each step the proposer drafts, the draft
tokens that match the stream are accepted, and one more token of the stream is added.

All peers run in one process, on one thread, and alternate every few steps (a "lap"). Peers that are not installed are
left out. A result is the median over the laps of the mean time in a lap. CPU caches are warm: the first steps of a lap
do not count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numba
import numpy as np
import torch
from laps import Lap, all_figures, in_turn, run, significant
from measuring import RESULTS, command, machine, write
from proposer_peers import Peer, about, make_peers
from proposer_plot import plot
from proposer_settings import CACHED, DEPTH, FACTOR, MAX_NUM_SEQS, MIN_PROB, OFFSET, SUFFIX, SUFFIX_NODES, ngram
from streams import Replay, digest, documents, random_documents, stretches
from suffix_differences import Options, differences

NUM_CACHED, CACHED_TOKENS = 100, 2500
NUM_ONLINE, PROMPT_TOKENS, ONLINE_TOKENS = 20, 500, 2500
CONTEXTS = (1024, 16 * 1024, 128 * 1024)
ROOM = 2048  # tokens that a request may generate after its context
NUM_COMPARED = 6  # requests whose drafts are compared, token by token
STEPS, STEPS_BEFORE = 32, 16  # of a lap: timed steps, and warm-up steps before them
NUM_ALONE = 8  # requests at batch 1, one after the other


def fill(peers: list[Peer], texts: list[np.ndarray]) -> dict[str, float]:
    """Time how long each peer (proposer) takes to cache the outputs of finished requests.

    texts: token ids of each request. The first token is the prompt, the rest is the output.
    Returns {name of the peer: median microseconds per output token}.
    """
    us: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for i, text in enumerate(texts):
        for peer in (peers, peers[::-1])[i % 2]:
            us[peer.name].append(1e6 * peer.cache(Replay(f"cached-{i}", text, 1)) / (len(text) - 1))
    return {name: median(values) for name, values in us.items()}


def online(texts: list[np.ndarray], number: int, peer: Peer) -> Lap | None:
    """Time a peer (proposer) on one request, which replays the token ids texts[number], until the request is finished.

    Returns None if the request is too short for a step.
    """
    request = Replay(f"online-{number}", texts[number], PROMPT_TOKENS)
    peer.start(request)
    request.advance(1)
    lap = run(peer, [request])
    peer.finish(request)
    return lap


def batches(peers: list[Peer], texts: list[np.ndarray], num_laps: int) -> dict[str, list[Lap]]:
    """Time the peers (proposers) on one batch of requests. Each peer has its own copy of the requests.

    texts: token ids of each request, prompt and output.
    num_laps: number of laps to time for each peer.
    Returns {name of the peer: its Laps}.
    """
    requests = {
        peer.name: [Replay(f"batch-{i}", text, PROMPT_TOKENS) for i, text in enumerate(texts)] for peer in peers
    }
    for peer in peers:
        for request in requests[peer.name]:
            peer.start(request)
            request.advance(1)
        run(peer, requests[peer.name], 1)  # reads the prompts
    return in_turn(peers, [partial(one_lap, requests, slice(None), 16, 1)] * num_laps)


def suffix(rounds: int, quick: int) -> dict[str, Any]:
    texts = documents(NUM_CACHED + NUM_ONLINE + MAX_NUM_SEQS, PROMPT_TOKENS + ONLINE_TOKENS)
    cached = [text[:CACHED_TOKENS] for text in texts[: NUM_CACHED // quick]]
    alone = texts[NUM_CACHED : NUM_CACHED + NUM_ONLINE // min(quick, 5)]
    together = texts[-MAX_NUM_SEQS:]
    insertion: list[dict[str, float]] = []
    laps: dict[str, dict[str, list[Lap]]] = {"batch 1": {}, f"batch {MAX_NUM_SEQS}": {}}
    for round_ in range(rounds + 1):
        peers = make_peers(SUFFIX.values())
        filled = fill(peers, cached)
        one = in_turn(peers, [partial(online, alone, i) for i in range(len(alone))])
        many = batches(peers, together, num_laps=8)
        if round_ == 0:  # the first one is the warm-up
            continue
        insertion.append(filled)
        for batch, done in zip(laps, (one, many), strict=True):
            for name, its_laps in done.items():
                laps[batch].setdefault(name, []).extend(its_laps)
    return {
        "streams": {"cached": digest(cached), "batch 1": digest(alone), f"batch {MAX_NUM_SEQS}": digest(together)},
        "insertion_us_per_token": {
            peer.name: significant(median(filled[peer.name] for filled in insertion)) for peer in peers
        },
        "bytes_per_cached_token": {name: memory(name, len(cached)) for name in SUFFIX if make_peers([SUFFIX[name]])},
        **{batch: all_figures(done) for batch, done in laps.items()},
    }


def memory(name: str, num_cached: int) -> dict[str, float]:
    script = Path(__file__).with_name("proposer_memory.py")
    arguments = [str(num_cached), str(CACHED_TOKENS), name]
    answer = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=True).stdout
    return {measure: significant(value) for measure, value in json.loads(answer.splitlines()[-1]).items()}


def equality(quick: int) -> dict[str, Any]:
    """Compare the chains that the suffix proposers draft after the same tokens.

    quick: divisor of the number of cached requests; above 1 for a short test of the script.
    Returns {kind of token stream: counts of equal and different drafts}.
    """
    length, num_cached = PROMPT_TOKENS + ONLINE_TOKENS, NUM_CACHED // quick
    number = num_cached + NUM_COMPARED
    options = Options(DEPTH, CACHED, FACTOR, OFFSET, MIN_PROB)
    streams = {"source": documents(number, length), "random": random_documents(number, length)}
    return {
        kind: differences(
            make_peers(SUFFIX.values()),
            texts[:num_cached],
            texts[num_cached:],
            PROMPT_TOKENS,
            SUFFIX_NODES,
            options,
        )
        for kind, texts in streams.items()
    }


def at_context(length: int, batch: int, num_laps: int) -> dict[str, Any]:
    """Measure every peer (proposer) on requests whose prompts have `length` tokens.

    batch: number of requests in a step. With 1, each lap takes the next one of several requests.
    num_laps: number of laps to time for each peer.
    Returns {name of the peer: its results}.
    """
    together = batch > 1
    texts = stretches(batch if together else NUM_ALONE, length + ROOM)
    found: dict[str, Any] = {}
    for makers in (ngram(length + ROOM), SUFFIX.values()):  # one group in memory at a time: at 128k it takes gigabytes
        peers = make_peers(makers)
        requests = {peer.name: [Replay(f"{i}", text, length) for i, text in enumerate(texts)] for peer in peers}
        for peer in peers:
            for request in requests[peer.name]:
                peer.start(request)
                request.advance(1)
                if not together:
                    run(peer, [request], 2)
            if together:
                run(peer, requests[peer.name], 2)

        parts = [slice(None)] if together else [slice(i, i + 1) for i in range(NUM_ALONE)]
        laps = [partial(one_lap, requests, parts[i % len(parts)], STEPS, STEPS_BEFORE) for i in range(num_laps)]
        found |= all_figures(in_turn(peers, laps))
    return found


def one_lap(requests: dict[str, list[Replay]], part: slice, most_steps: int, num_before: int, peer: Peer) -> Lap | None:
    return run(peer, requests[peer.name][part], most_steps, num_before=num_before)


def contexts(rounds: int, lengths: list[int]) -> dict[str, Any]:
    return {
        f"batch {batch}": {str(length): at_context(length, batch, num_laps=3 * rounds) for length in lengths}
        for batch in (1, MAX_NUM_SEQS)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS, help="lengths in tokens")
    parser.add_argument("--quick", type=int, default=1, help="so many times fewer cached requests, to try the script")
    parser.add_argument("--out", type=Path, default=RESULTS / "proposers.json")
    args = parser.parse_args()

    # vLLM's proposer sets numba's threads and with them those of torch's operations.
    numba.set_num_threads(1)
    torch.set_num_threads(1)
    peers = make_peers([*ngram(2048), *SUFFIX.values()], say=print)
    record = {
        "command": command("proposers.py"),
        "machine": machine(("specdec-core",)),
        "peers": about(peers),
        "rounds": args.rounds,
        "suffix": suffix(args.rounds, args.quick),
        "suffix_drafts": equality(args.quick),
        "contexts": contexts(args.rounds, args.contexts),
    }
    write(record, args.out)
    plot(record["contexts"], args.out.with_suffix(".png"))
    print(json.dumps({key: record[key] for key in ("suffix", "suffix_drafts", "contexts")}, indent=1))


if __name__ == "__main__":
    main()
