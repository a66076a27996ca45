"""What ranks must agree on, in a few numbers that can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

from specdec_core.contracts.kv import KVManager
from specdec_core.contracts.proposer import RequestView
from specdec_core.ranks.messages import Sum
from specdec_core.ranks.requests import Slots


def digest(
    kv: KVManager,
    messages: Sum,
    slots: Slots,
    requests: Sequence[RequestView | None],
) -> tuple[Any, ...]:
    """Return the number and checksum of messages, the slots that requests have, a checksum of their tokens, and the
    number of free blocks.

    slots: the arguments of `KVManager.metadata`. requests: the same ones; None: not known.
    """
    metadata = kv.metadata(*slots)
    tokens = [None if request is None else crc32(request.token_ids.tobytes()) for request in requests]
    return messages.num_messages, messages.checksum, metadata.slot_mapping.tolist(), tokens, kv.num_free_blocks
