"""Where compiled layers find the cosines and sines of rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_not
from typing import Any

import numpy as np
import torch
from attrs import frozen

from specdec_core.ops.decoder import Angles
from specdec_kernels.layer_inputs import check_positions, check_tables


@frozen(eq=False)
class Placed:
    """The rotary embeddings of a forward pass.

    tables: int64 [number, 3], as `run_stages` takes them.
    rows: int64 [num_tokens], each token's row in the tables; None: token i has row i.
    """

    tables: np.ndarray
    rows: torch.Tensor | None

    @property
    def rows_address(self) -> int:
        return 0 if self.rows is None else self.rows.data_ptr()


class Ropes:
    """Checks tables of cosines and sines, and finds their addresses. Tables that are the same as last time are not
    looked at again.

    widths: {index of a rotary embedding: head_dim}.
    """

    def __init__(self, widths: Mapping[int, int]) -> None:
        self._widths = widths
        self._given: list[Any] = []  # the dtype and the tables of last time
        self._kept: list[Angles] = []  # whose addresses these are
        self._tables, self._num_rows = np.empty((0, 3), dtype=np.int64), 0

    def at(self, ropes: Sequence[Angles], positions: torch.Tensor | None, hidden: torch.Tensor) -> Placed:
        """Return the tables for the tokens of a forward pass. Raises ValueError if they do not fit.

        hidden: [num_tokens, width], of the dtype that the tables must have. The others: as for `fuse_layers`.
        """
        num_tokens = hidden.shape[0]
        given = [hidden.dtype, *(table for tables in ropes for table in tables)]
        if len(given) != len(self._given) or any(map(is_not, given, self._given)):
            self._place(ropes, hidden.dtype)
            self._given = given
        check_positions(positions, num_tokens, self._num_rows)
        return Placed(self._tables, None if positions is None else positions.contiguous())

    def _place(self, ropes: Sequence[Angles], dtype: torch.dtype) -> None:
        check_tables(ropes, self._widths, dtype)
        self._kept = [(cos.contiguous(), sin.contiguous()) for cos, sin in ropes]
        addresses = [(cos.data_ptr(), sin.data_ptr(), len(cos)) for cos, sin in self._kept]
        self._tables = np.array(addresses, dtype=np.int64)
        self._num_rows = min(len(cos) for cos, _ in self._kept)
