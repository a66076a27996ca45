"""The meanings of tokens: texts, or roles such as EOS. Tokens of two tokenizers are paired if they mean the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

Meaning = bytes | str
"""The bytes of a token's text; for a special token its role or its name."""

EOS = "eos_token_id"
ROLES = (EOS, "bos_token_id", "pad_token_id")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@frozen
class Meanings:
    """The meanings of a tokenizer's tokens. An ordinary token has one meaning, the bytes of its text. A special token
    has its role, if any, and its name as meanings.

    of_id: token id -> all meanings of the token; the role of a special token comes before its name.
    ids: meaning -> token id. If several tokens have the same meaning, the lowest of their ids is used. Byte tokens
        such as <0x41> are used only if no other token has the meaning.
    """

    of_id: Mapping[int, tuple[Meaning, ...]]
    ids: Mapping[Meaning, int]

    @classmethod
    def of(cls, tokenizer: Any, num_ids: int) -> Meanings:
        """Read the meanings of all tokens with ids below num_ids. tokenizer: a tokenizer of transformers."""
        tokens = {i: token for token, i in tokenizer.get_vocab().items() if i < num_ids}
        known = {role: getattr(tokenizer, role, None) for role in ROLES}
        roles: dict[str, int] = {role: i for role, i in known.items() if i is not None and i in tokens}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {*roles.values(), *tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        found: dict[int, tuple[Meaning, ...]] = {i: (token,) for i, token in tokens.items() if i in special}
        for role, i in reversed(roles.items()):
            found[i] = (role, *found[i])
        ordinary = [i for i in sorted(tokens) if i not in special]
        ordinary.sort(key=lambda i: _BYTE_TOKEN.fullmatch(tokens[i]) is not None)  # byte tokens last
        for i, text in _texts(tokenizer, ordinary):
            if meaning := _text_bytes(tokens[i], text):
                found[i] = (meaning,)
        ids: dict[Meaning, int] = {}
        ids.update(roles)
        for i, meanings in found.items():
            ids.setdefault(meanings[-1], i)
        return cls(found, ids)

    def pairs_with(self, other: Meanings) -> dict[int, int]:
        """Pair tokens of this tokenizer with tokens of another one that have the same meaning. Returns {token id: token
        id in the other tokenizer}. Roles are paired first, and no token is in two pairs."""
        pairs: dict[int, int] = {}
        taken: set[int] = set()
        for meaning, i in self.ids.items():
            its = other.ids.get(meaning)
            if its is not None and i not in pairs and its not in taken:
                pairs[i] = its
                taken.add(its)
        return pairs

    def nearest(self, meanings: tuple[Meaning, ...]) -> int:
        """Return the id of the token that best replaces a token of another tokenizer.

        It is the token with the same meaning. If there is none, it is the token whose text is the longest suffix of the
        other token's text, or else the EOS token.

        meanings: the meanings of the other tokenizer's token.
        """
        for meaning in meanings:
            for start in range(len(meaning)) if isinstance(meaning, bytes) else (0,):
                if (found := self.ids.get(meaning[start:])) is not None:
                    return found
        return self.ids.get(EOS, 0)


def _texts(tokenizer: Any, ids: list[int]) -> Iterator[tuple[int, str]]:
    """Yield (id, text) of each token. Tokenizers may drop a space at the beginning of a text, so each token is decoded
    after an alphanumeric token, whose text is then cut off."""
    settings = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    alone = ((i, tokenizer.decode([i], **settings)) for i in ids)
    anchor = next(((i, text) for i, text in alone if text.isascii() and text.strip().isalnum()), None)
    prefix, before = ([anchor[0]], anchor[1]) if anchor else ([], "")
    behind = tokenizer.batch_decode([[*prefix, i] for i in ids], **settings)
    return ((i, text.removeprefix(before)) for i, text in zip(ids, behind, strict=True) if text.startswith(before))


def _text_bytes(token: str, text: str) -> bytes | None:
    """Return the bytes of a token's text, or None if they are unknown.

    token: the token as the vocabulary writes it.
    text: the decoded token. If the token is only a part of a character, its byte is read from `token` instead.
    """
    if REPLACEMENT not in text:
        return text.encode()
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(match[1])
    if token.replace("▁", " ") == text:  # the character itself
        return text.encode()
    if all(character in _BYTE_OF for character in token):
        as_bytes = bytes(_BYTE_OF[character] for character in token)
        return as_bytes if as_bytes.decode(errors="replace") == text else None
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character stands for in the vocabulary of a byte-level tokenizer such as GPT-2's. A
    printable byte is written as the character with the same code, any other byte as a character with a code from 256
    on."""
    printing = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
