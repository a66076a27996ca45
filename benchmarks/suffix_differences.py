"""Compares the drafts of two suffix proposers, step by step, after the same tokens.

Two correct drafts may differ where tokens are equally frequent. So if the drafts differ, the script checks that each is
among the drafts of a slow reference implementation, which returns one draft for each way to break such ties.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from proposer_peers import Peer
from streams import Replay

sys.path.insert(0, str(Path(__file__).parents[1] / "proposers" / "suffix" / "tests"))

from suffix_reference import Options, Reference
from suffix_scanned import ScannedTree

CHECK_EVERY = 20  # one of so many equal drafts is checked with the reference, too


def differences(
    peers: Sequence[Peer],
    cached: Sequence[np.ndarray],
    online: Sequence[np.ndarray],
    prompt_tokens: int,
    max_nodes: int,
    options: Options,
) -> dict[str, Any]:
    """Let the proposers draft for the same requests and count the steps in which their drafts differ.

    peers: two new proposers, or one that is compared with the reference implementation only.
    cached: token ids of requests that are finished first, so that the proposers cache their outputs.
    online: token ids of requests that are then replayed step by step.
    prompt_tokens: how many token ids of each request are its prompt.
    max_nodes: maximum number of tokens in a draft.
    options: options of the reference implementation.
    Raises SystemExit if a draft is not among those of the reference implementation.
    """
    reference = Reference(options, ScannedTree)
    for i, text in enumerate(cached):
        for peer in peers:
            peer.cache(Replay(f"cached-{i}", text, prompt_tokens))
        reference.start(f"cached-{i}", prompt_tokens)
        reference.extend(f"cached-{i}", text.tolist())
        reference.finish(f"cached-{i}")
    found: Counter[str] = Counter()
    for i, text in enumerate(online):
        replays = [Replay(f"online-{i}", text, prompt_tokens) for _ in peers]
        reference.start(f"online-{i}", prompt_tokens)
        for peer, replay in zip(peers, replays, strict=True):
            peer.start(replay)
            replay.advance(1)
        while not replays[0].is_over:
            step(peers, replays, reference, max_nodes, found)
        for peer, replay in zip(peers, replays, strict=True):
            peer.finish(replay)
        catch_up(reference, replays[0])
        reference.finish(f"online-{i}")
    num_steps = found["steps"]
    compared = {"equal": round(found["equal"] / num_steps, 4), "num_explained_by_a_tie": found["tie"]}
    return {
        "peers": [peer.name for peer in peers],
        "num_steps": num_steps,
        **(compared if len(peers) > 1 else {}),
        "num_unexplained": 0,
        "num_checked_with_the_reference": found["checked"],
        "share_of_them_with_one_draft_allowed": round(found["one"] / max(found["checked"], 1), 4),
    }


def step(
    peers: Sequence[Peer], replays: Sequence[Replay], reference: Reference, max_nodes: int, found: Counter[str]
) -> None:
    tokens = replays[0].token_ids
    key = replays[0].id
    drafts = [peer.step([replay])[0][0] for peer, replay in zip(peers, replays, strict=True)]
    catch_up(reference, replays[0])
    are_equal = len(peers) > 1 and all(draft == drafts[0] for draft in drafts)
    found["steps"] += 1
    found["equal"] += are_equal
    if not are_equal or found["steps"] % CHECK_EVERY == 0:
        allowed = {tuple(node.token_id for node in chain) for chain in reference.drafts(key, max_nodes)}
        for peer, draft in zip(peers, drafts, strict=True):
            if tuple(draft) not in allowed:
                raise SystemExit(f"{peer.name} drafts {draft} after ...{tokens[-24:].tolist()}; allowed are {allowed}")
        found["checked"] += 1
        found["one"] += len(allowed) == 1
        found["tie"] += not are_equal and len(peers) > 1
    num_accepted = replays[0].verify(drafts[0])
    for replay in replays[1:]:
        replay.advance(num_accepted + 1)


def catch_up(reference: Reference, replay: Replay) -> None:
    reference.extend(replay.id, replay.token_ids[len(reference.requests[replay.id].tokens) :].tolist())
