"""Self-generated training data: the target itself continues prompts (on-policy data for distillation)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from specdec_core import LLM, ConfigError, SamplingParams
from specdec_train.data import Text, join
from specdec_train.files import write_text
from specdec_train.settings import Settings

AT_ONCE = 64


def generated_texts(
    settings: Settings,
    prompts: Sequence[Text],
    file: Path,
    description: dict[str, object],
    max_model_len: int,
    check: Callable[[], None],
) -> list[Text]:
    """Return training texts that consist of a prompt and the target's continuation.

    prompts: texts that begin with a prompt: the tokens before the first one for which the loss mask is True.
    file: where the generated texts are saved. If it exists with the same description, the texts are read from it.
    description: the settings that determine the generated texts.
    max_model_len: the most tokens that the target takes, prompt and continuation together.
    check: called before each batch; raises KeyboardInterrupt if the run was interrupted.

    Raises ConfigError if a prompt and its continuation would exceed max_model_len, or if the file has another
    description.
    """
    if file.exists():
        its, texts = _read(file)
        if its == description:
            return texts
        raise ConfigError(
            f"{file} was generated with other settings or from other data: delete it, or name another --out"
        )
    beginnings = [beginning(text, settings.prompt_len).tolist() for text in prompts if len(text.token_ids)]
    most, longest = max_model_len - settings.generate, max(map(len, beginnings), default=0)
    if longest > most:
        raise ConfigError(
            f"a prompt has {longest} tokens, and with generate={settings.generate} it may have {max(most, 0)}: shorten "
            f"it, lower prompt_len, or generate less"
        )
    pairs = []
    with LLM(
        settings.target,
        dtype=settings.dtype,
        device=settings.device,
        skip_tokenizer_init=True,
        max_num_seqs=AT_ONCE,
        disable_log_stats=True,
    ) as llm:
        for start in tqdm(range(0, len(beginnings), AT_ONCE), desc="generate", unit="batch"):
            check()
            part = beginnings[start : start + AT_ONCE]
            params = [
                SamplingParams(
                    temperature=settings.temperature, max_tokens=settings.generate, seed=settings.seed + start + i
                )
                for i in range(len(part))
            ]
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in part], params, use_tqdm=False)
            pairs += [(ids, list(output.outputs[0].token_ids)) for ids, output in zip(part, outputs, strict=True)]
    write_text(file, "".join(json.dumps(line) + "\n" for line in (description, *pairs)))
    return [join(*(np.array(part, dtype=np.int32) for part in pair)) for pair in pairs]


def _read(file: Path) -> tuple[object, list[Text]]:
    try:
        first, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        return first, [join(*(np.array(part, dtype=np.int32) for part in pair)) for pair in lines]
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged ({type(error).__name__}: {error}): delete it") from error


def beginning(text: Text, prompt_len: int) -> np.ndarray:
    """Return the tokens of a text before the first one for which the loss mask is True. Returns all tokens if the mask
    is False everywhere, and the first prompt_len tokens if the mask is True for the first token."""
    num_marked = int(text.counts.argmax()) if text.counts.any() else len(text.counts)
    return text.token_ids[: num_marked or prompt_len]
