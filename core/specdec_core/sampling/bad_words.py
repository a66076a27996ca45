"""The sampling parameter bad_words: forbids each token that would complete one of the given words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen

from specdec_core.errors import ConfigError

if TYPE_CHECKING:
    from specdec_core.sampling.constraints import ConstrainedRows

ANYTHING = -2  # in a word that is shorter than the longest
NOTHING = -1  # before the output's first token


@frozen(eq=False)
class BadWords:
    """The words of one request as token ids, prepared once when it is submitted."""

    last_ids: np.ndarray  # int64 [num_words]
    before: np.ndarray  # int64 [num_words, most - 1]   the tokens before the last one, the newest first, padded with
    #                     ANYTHING up to the longest word's

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> BadWords:
        """words: token ids of each, at least one."""
        before = np.full((len(words), max(map(len, words)) - 1), ANYTHING)
        for row, word in zip(before, words, strict=True):
            row[: len(word) - 1] = word[-2::-1]
        return cls(np.array([word[-1] for word in words]), before)

    @property
    def single_ids(self) -> np.ndarray:
        """int64 [n]   the words that are one token."""
        single: np.ndarray = self.last_ids[(self.before == ANYTHING).all(axis=1)]
        return single

    def padded(self, num_before: int) -> np.ndarray:
        """int64 [num_words, num_before]   `before`, padded further."""
        return np.pad(self.before, ((0, 0), (0, num_before - self.before.shape[1])), constant_values=ANYTHING)


def tokenize_words(words: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Tokenize each word twice: without and with a space before it.

    Spaces before a word are ignored. The token ids with a space are left out if they begin or end with those without,
    which forbid them, too: for instance where the tokenizer makes the space a token of its own. Raises ConfigError for
    a word of spaces alone.
    """
    found: list[list[int]] = []
    for word in words:
        bare = word.lstrip()
        token_ids: list[int] = tokenizer(bare, add_special_tokens=False).input_ids
        if not token_ids:
            raise ConfigError(f"bad_words has {word!r}, and spaces before a word are ignored: give a word")
        found.append(token_ids)
        spaced: list[int] = tokenizer(f" {bare}", add_special_tokens=False).input_ids
        if token_ids not in (spaced[: len(token_ids)], spaced[-len(token_ids) :]):
            found.append(spaced)
    return found


def forbid_bad_words(logits: torch.Tensor, rows: ConstrainedRows) -> None:
    """In place: in each row of logits, set to -inf each token that would complete a bad word, given the tokens before
    it."""
    words = [c.bad_words for c in rows.constraints if c.bad_words is not None]
    num_before = max(each.before.shape[1] for each in words)
    ends = np.cumsum([len(each.last_ids) for each in words])
    positions, chosen = rows.pairs(np.split(np.arange(ends[-1]), ends[:-1]))
    last_ids = np.concatenate([each.last_ids for each in words])
    before = rows.to_device(np.concatenate([each.padded(num_before) for each in words])[chosen])  # [m, num_before]
    is_complete = (before == _newest(rows, num_before)[rows.to_device(positions)]) | (before == ANYTHING)
    forbidden = torch.where(is_complete.all(dim=1), -torch.inf, 0.0).to(logits.dtype)
    at = rows.to_device(rows.host_rows[positions]), rows.to_device(last_ids[chosen])
    logits.index_put_(at, forbidden, accumulate=True)


def _newest(rows: ConstrainedRows, count: int) -> torch.Tensor:
    """int64 [n, count]   for each row of logits, the last `count` output tokens before it, including draft tokens,
    newest first; NOTHING where there are fewer."""
    output = np.full((len(rows.requests), count), NOTHING)
    for newest, request in zip(output, rows.requests, strict=True):
        tokens = request.token_ids[request.num_prompt_tokens :][::-1][:count]
        newest[: len(tokens)] = tokens
    known = rows.to_device(output[rows.owners])
    places = torch.arange(count, device=known.device) - rows.depths.unsqueeze(1)  # below 0: a node's
    if rows.path.shape[1] == 0 or count == 0:
        return known
    in_path = rows.path[:, : min(count, rows.path.shape[1])]
    in_path = torch.nn.functional.pad(in_path, (0, count - in_path.shape[1]), value=NOTHING)
    return torch.where(places < 0, in_path, known.gather(1, places.clamp(min=0)))
