"""Values that are small in memory and huge once they are written out."""

from __future__ import annotations

from typing import Any


class Counted:
    num_written = 0

    def __repr__(self) -> str:
        Counted.num_written += 1
        return "x"


def nested(depth: int, inner: Any) -> Any:
    """Nest `inner` in lists of 9 elements, `depth` levels deep.

    The elements of a list are the same object, so the result needs little memory.
    """
    for _ in range(depth):
        inner = [inner] * 9
    return inner
