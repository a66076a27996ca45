"""Tests of draft models with another tokenizer than the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from noisy_copy import noisy_copy
from other_vocabularies import TEXT, byte_level, renumber, save_words, sentence_piece

from specdec_core import LLM, CompatibilityError, ConfigError, SamplingParams, TargetInfo
from specdec_core.api.arguments import dry_run
from specdec_proposer_draft.token_meanings import REPLACEMENT, Meanings
from specdec_proposer_draft.vocabulary import SharedVocabulary
from specdec_testing import tiny_target

SETTINGS = {"dtype": "float32", "num_kv_blocks": 64, "max_num_batched_tokens": 32, "skip_tokenizer_init": True}
KINDS = {"bytes": byte_level, "pieces": sentence_piece}
WORDS = [f"w{i}" for i in range(48)]


def info(tokenizer: Any, padding: int = 0) -> TargetInfo:
    return TargetInfo("m", "llama", len(tokenizer) + padding, 8, 1, 64, torch.float32, torch.device("cpu"))


def share(of_target: Any, of_draft: Any, padding: int = 0) -> SharedVocabulary:
    return SharedVocabulary.by_text(of_draft, of_target, info(of_draft, padding), info(of_target, padding))


def pairs(of_target: Any, of_draft: Any) -> dict[str, str]:
    found = share(of_target, of_draft)
    both = zip(found.target_ids.tolist(), found.draft_ids.tolist(), strict=True)
    name, its = of_target.convert_ids_to_tokens, of_draft.convert_ids_to_tokens
    return {name(i): its(j) for i, j in both}


def stand_in(of_target: Any, of_draft: Any, token: str) -> str:
    found = share(of_target, of_draft).stand_in[of_target.convert_tokens_to_ids(token)]
    return of_draft.convert_ids_to_tokens(int(found))


LINES = st.lists(st.text("aabcde  éß狐🦊\n", min_size=1, max_size=40), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(lines=LINES, its_lines=LINES, kinds=st.tuples(*[st.sampled_from(sorted(KINDS))] * 2), data=st.data())
def test_shared_tokens_have_the_same_text(lines, its_lines, kinds, data):
    """Paired tokens have the same text, decoded alone and after other tokens, and no token is in two pairs."""
    of_target, of_draft = KINDS[kinds[0]]([*lines, "xa"], 300), KINDS[kinds[1]]([*its_lines, "xb"], 290)
    found = share(of_target, of_draft, padding=7)
    ours, its = found.target_ids.tolist(), found.draft_ids.tolist()
    assert len(set(ours)) == len(ours) == len(set(its))
    assert found.stand_in[found.target_ids].tolist() == its
    assert len(found.stand_in) == len(of_target) + 7
    assert 0 <= int(found.stand_in.min()) <= int(found.stand_in.max()) < len(of_draft)
    plain = next(
        n for n, i in enumerate(ours) if of_target.decode([i]) == "x"
    )  # at a text's beginning, spaces may be dropped
    chosen = [plain, *data.draw(st.lists(st.integers(0, len(ours) - 1), max_size=12))]
    text, its_text = of_target.decode([ours[n] for n in chosen]), of_draft.decode([its[n] for n in chosen])
    assert text == its_text or REPLACEMENT in text, (text, its_text)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokenizer_shares_everything(kind):
    tokenizer = KINDS[kind](eos_token="<e>", bos_token="<b>")
    found = share(tokenizer, tokenizer)
    same = [i for i in range(len(tokenizer)) if tokenizer.convert_ids_to_tokens(i) not in doubles(tokenizer)]
    assert found.target_ids.tolist() == found.draft_ids.tolist() == same
    assert found.stand_in[same].tolist() == same


def doubles(tokenizer: Any) -> set[str]:
    """Return the byte tokens, such as <0x41>, whose character is also an ordinary token."""
    tokens = set(tokenizer.get_vocab())
    return {f"<0x{byte:02X}>" for byte in range(128) if chr(byte).replace(" ", "▁") in tokens} & tokens


def test_what_is_paired():
    found = pairs(byte_level(), sentence_piece([TEXT.replace("\n", " ")]))
    assert found["x"] == "x", "and not <0x78>, which is the same text"
    assert found["\u010a"] == "<0x0A>", "a line's end, which is a token there only as a byte"
    assert found["\u0120the"] == "▁the"
    assert found["\u0120"] == "▁"
    assert found["\u00e6"] == "<0xE6>", "a part of a character"
    assert found["\u00c3\u00bc"] == "ü"
    assert "the" not in found or found["the"] == "the"


def test_special_tokens_are_paired_by_what_they_do():
    of_target = byte_level(eos_token="end", bos_token="<s>", pad_token="<pad>", sep_token="<same>")
    of_draft = sentence_piece(eos_token="</s>", bos_token="end", mask_token="<same>")
    found = pairs(of_target, of_draft)
    asked = ("end", "<s>", "<pad>", "<same>")
    assert [found.get(token) for token in asked] == ["</s>", "end", None, "<same>"]
    assert stand_in(of_target, of_draft, "<pad>") == "</s>"
    ordinary = byte_level(["end " * 9], 258)
    assert "end" in ordinary.get_vocab()
    assert "end" not in pairs(ordinary, of_draft), "text is never a special token"


def test_one_special_token_with_two_roles():
    of_target, of_draft = byte_level(eos_token="<e>", bos_token="<b>"), byte_level(eos_token="<x>", bos_token="<x>")
    assert pairs(of_target, of_draft)["<e>"] == "<x>"
    assert "<b>" not in pairs(of_target, of_draft)
    assert stand_in(of_target, of_draft, "<b>") == "<x>"
    assert pairs(of_draft, of_target)["<x>"] == "<e>"
    assert stand_in(of_draft, of_target, "<x>") == "<e>"


def test_others_are_stood_for_by_their_longest_end():
    of_target, of_draft = byte_level(["abcde " * 9], 260), byte_level(["cde cde de"], 258)
    assert "abcde" in of_target.get_vocab()
    assert of_draft.convert_ids_to_tokens([256, 257]) == ["de", "cde"]
    assert stand_in(of_target, of_draft, "abcde") == "cde"
    part = sentence_piece(["狐"], 300)
    assert stand_in(part, byte_level(["x"], 257), "狐") == "\u0132", "the last of its three bytes, 0x90"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_target(tmp_path_factory.mktemp("target"))
    save_words(folder, WORDS)
    return folder


def drafting(target: Path, draft: Path, **options: Any) -> LLM:
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4, **options}
    return LLM(str(target), speculative_config=config, **SETTINGS)


def outputs(llm: LLM, vocab_size: int = 48, **params: Any) -> list[Any]:
    prompts = [{"prompt_token_ids": [(7 * n + i) % vocab_size for i in range(n)]} for n in (1, 5, 40)]
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 21, "ignore_eos": True, "seed": 3} | params)
    return llm.generate(prompts, sampling, use_tqdm=False)


def token_ids(llm: LLM, vocab_size: int = 48, **params: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs(llm, vocab_size, **params)]


def test_the_same_model_in_other_words_is_accepted_whole(target, tmp_path):
    """If the draft model is a copy of the target with other token ids, every draft token is accepted."""
    ids = [*range(47, 20, -1), None, *range(21), None]
    draft = renumber(target, tmp_path, ids)
    save_words(draft, [f"own{i}" if its is None else f"w{its}" for i, its in enumerate(ids)])
    for output in outputs(drafting(target, draft, use_heterogeneous_vocab=True)):
        assert output.speculation.acceptance_length == 5


@pytest.mark.parametrize(
    ("kinds", "shape"), [(("bytes", "pieces"), None), (("pieces", "bytes"), "[(0,), (1,), (0, 0), (0, 1)]")]
)
def test_outputs_are_plain_decodings(kinds, shape, tmp_path):
    of_target, of_draft = (KINDS[kind](eos_token="<e>") for kind in kinds)
    target = tiny_target(tmp_path / "target", vocab_size=len(of_target) + 3)
    common = share(of_target, of_draft)
    ids: list[int | None] = [None] * (len(of_draft) + 5)
    for i, its in zip(common.target_ids.tolist(), common.draft_ids.tolist(), strict=True):
        ids[its] = i
    draft = renumber(target, tmp_path / "draft", ids, noise=0.02)
    of_target.save_pretrained(target)
    of_draft.save_pretrained(draft)
    plain, size = LLM(str(target), **SETTINGS), len(of_target) + 3
    options = {"use_heterogeneous_vocab": True, "speculative_token_tree": shape}
    llm = drafting(target, draft, **options)
    for temperature in (0, 0.7, 1.5):
        assert token_ids(llm, size, temperature=temperature) == token_ids(plain, size, temperature=temperature)
    (accepted,) = (m.value for m in llm.get_metrics() if m.name.endswith("num_accepted_tokens"))
    assert accepted > 5
    sampled = drafting(target, draft, draft_sample_method="probabilistic", **options)
    assert token_ids(sampled, size) == token_ids(plain, size)
    drawn = token_ids(sampled, size, temperature=0.7)
    assert drawn == token_ids(sampled, size, temperature=0.7)


def test_equal_vocabularies_are_drafted_by_as_ever(target, tmp_path):
    draft = noisy_copy(target, tmp_path)
    save_words(draft, WORDS)
    found = []
    for option in (False, True):
        llm = drafting(target, draft, use_heterogeneous_vocab=option, draft_sample_method="probabilistic")
        tokens = token_ids(llm, temperature=0.8)
        found.append((tokens, [m.value for m in llm.get_metrics() if "num_" in m.name]))
    assert found[0] == found[1]


class TestRefusals:
    def refusal(self, target: Path, draft: Path, **options: Any) -> str:
        config = {"method": "draft_model", "model": str(draft), **options}
        with pytest.raises((CompatibilityError, ConfigError)) as caught:
            dry_run(str(target), speculative_config=config, skip_tokenizer_init=True)
        return str(caught.value)

    def test_without_the_option(self, target, tmp_path):
        draft = tiny_target(tmp_path)
        save_words(draft, [*WORDS[:40], *"abcdefgh"])
        message = self.refusal(target, draft)
        assert "16 entries differ, the first at id 40 ('w40' in the target, 'a' in the draft)" in message
        assert "or give use_heterogeneous_vocab=True to draft the shared tokens: 40 of the target's 48 tok" in message

    @pytest.mark.parametrize("num_shared", [0, 1])
    def test_too_few_tokens_in_common(self, num_shared, target, tmp_path):
        words = [f"w{i}" for i in range(101)]
        target, draft = tiny_target(tmp_path / "target", vocab_size=101), tiny_target(tmp_path / "draft")
        save_words(target, words)
        save_words(draft, [*words[:num_shared], *(f"own{i}" for i in range(48 - num_shared))])
        message = self.refusal(target, draft, use_heterogeneous_vocab=True)
        assert (
            f"{num_shared} of the target's 101 tokens stand for the same text in both, and at least 1% are needed"
            in message
        )
        assert "use_heterogeneous_vocab" not in self.refusal(target, draft)

    def test_without_a_tokenizer(self, target, tmp_path):
        message = self.refusal(target, tiny_target(tmp_path), use_heterogeneous_vocab=True)
        assert "compares the texts of tokens" in message
        assert "cannot both be loaded: put their files into" in message

    def test_what_is_no_flag(self, target):
        assert "use_heterogeneous_vocab='yes'" in self.refusal(target, target, use_heterogeneous_vocab="yes")


def test_meanings_are_of_ids_that_there_are():
    """`Meanings` leaves out token ids that the model's embedding lacks, since a tokenizer may have more tokens than its
    model."""
    tokenizer = byte_level(eos_token="<e>")
    found = Meanings.of(tokenizer, 100)
    assert {*found.of_id} == {*range(100)}
    assert max(found.ids.values()) == 99
