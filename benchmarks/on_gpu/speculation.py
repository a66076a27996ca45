"""Speculation at a real acceptance rate: the embedded model, inflated to the layers of a larger one without a change of
its function, and its drafts alike.

The predicted speed-up is acceptance length x T_plain / (T_draft + T_verify). T_plain is the time of the target's
forward pass and of sampling in a step of plain decoding, T_verify that of a step with drafts. T_draft is the time of
drafting, including that of showing hidden states to the proposer. Each is measured alone: it ends when the device has
done all that it launched.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import heldout
import torch
from attrs import frozen

from on_gpu.decoding import Decoded, batches, decode, parts_alone
from on_gpu.models import copies_of, inflated_tiny, loading
from on_gpu.setup import MODEL_FREE, Rows, Setup
from on_gpu.timing import attempt, free, said
from specdec_core import LLM, SamplingParams

COLUMNS = (
    *("tokens_per_s", "ms_per_step", "speed_up", "acceptance_length", "predicted_speed_up", "share_of_predicted"),
    *("draft_ms", "verify_ms", "num_speculative_tokens", "graph_share"),
)
TEMPERATURES = (0.0, 1.0)
MAX_MODEL_LEN = 1024
BUILD_S, CELL_S = 8.0, 3.0
"""What an engine and a cell take at most, about."""


def predicted_speed_up(acceptance_length: float, plain_s: float, draft_s: float, verify_s: float) -> float:
    return acceptance_length * plain_s / (draft_s + verify_s)


def config_of(method: str) -> dict[str, Any] | None:
    """The method's defaults, but for a number of draft tokens that does not adapt."""
    if method == "plain":
        return None
    return {"method": method, "adaptive_draft_length": False, **MODEL_FREE.get(method, {})}


@frozen
class Cell:
    """decoded: what was timed. alone: the same steps, of which each part was timed alone."""

    decoded: Decoded
    alone: Decoded

    def row(self, plain: Cell) -> dict[str, Any]:
        speed_up = self.decoded.tokens_per_s / plain.decoded.tokens_per_s
        steps, plain_steps = self.alone.num_steps, plain.alone.num_steps
        predicted = predicted_speed_up(
            self.decoded.acceptance_length,
            plain.alone.target_s / plain_steps,
            self.alone.draft_s / steps if self is not plain else 0.0,
            self.alone.target_s / steps,
        )
        return {
            "tokens_per_s": round(self.decoded.tokens_per_s, 2),
            "ms_per_step": round(self.decoded.ms_per_step, 4),
            "speed_up": round(speed_up, 3),
            "acceptance_length": round(self.decoded.acceptance_length, 3),
            "predicted_speed_up": round(predicted, 3),
            "share_of_predicted": round(speed_up / predicted, 3),
            "draft_ms": round(1e3 * self.alone.draft_s / steps, 4),
            "verify_ms": round(1e3 * self.alone.target_s / steps, 4),
            "graph_share": self.decoded.graph_share,
        }


def rows(setup: Setup) -> Rows:
    for shape in setup.sizes.shapes:
        with tempfile.TemporaryDirectory() as name:
            yield from _of_shape(setup, shape, Path(name) / shape)
        free()


def _of_shape(setup: Setup, shape: str, folder: Path) -> Rows:
    times, widths = setup.sizes.shapes[shape]
    try:
        model = inflated_tiny(folder, times, widths, setup.device, setup.dtype)
    except Exception as error:
        yield {"model": shape, "error": said(error)}
        return
    free()
    yield {"model": shape, "num_weights": sum(each.numel() for each in model.parameters())}
    plain: dict[tuple[int, float], Cell] = {}
    with loading({str(folder): copies_of(model)}):
        for method in ("plain", *setup.sizes.methods):
            yield from _of_method(setup, {"model": shape, "method": method}, folder, plain)
            free()


def _of_method(setup: Setup, row: dict[str, Any], folder: Path, plain: dict[tuple[int, float], Cell]) -> Rows:
    cells = [*product(setup.sizes.batches, TEMPERATURES)]
    needed_s = BUILD_S if setup.device == "cuda" else 0
    built: list[LLM] = []

    def build() -> dict[str, Any]:
        built.append(_engine(setup, folder, config_of(row["method"])))
        return {}

    failed = attempt(setup, row, build, needed_s)
    if not built:
        yield failed
        return
    (llm,) = built
    with llm:
        for batch, temperature in cells:
            cell = {**row, "batch": batch, "temperature": temperature}
            needed_s = CELL_S if setup.device == "cuda" else 0
            yield attempt(
                setup, cell, lambda key=(batch, temperature): _cell(setup, llm, row["method"], key, plain), needed_s
            )


def _engine(setup: Setup, folder: Path, config: dict[str, Any] | None) -> LLM:
    return LLM(
        str(folder),
        device=setup.device,
        dtype=setup.dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max(setup.sizes.batches),
        speculative_config=config,
    )


def _cell(
    setup: Setup, llm: LLM, method: str, key: tuple[int, float], plain: dict[tuple[int, float], Cell]
) -> dict[str, Any]:
    found = _measure(setup, llm, *key)
    if method == "plain":
        plain[key] = found
    if key not in plain:
        raise RuntimeError(
            "plain decoding failed for this batch size and temperature: there is nothing to compare with"
        )
    return {**found.row(plain[key]), "num_speculative_tokens": llm.engine.num_speculative_tokens}


def _measure(setup: Setup, llm: LLM, batch: int, temperature: float) -> Cell:
    sizes, params = setup.sizes, SamplingParams(temperature=temperature)
    groups = batches([*prompts_of(llm, max(batch, sizes.prompts), sizes.prompt_tokens)], batch)
    torch.manual_seed(0)
    decode(llm.engine, groups, params, sizes.timed_steps, sizes.warm_steps)  # captures graphs of all sizes
    decoded = decode(llm.engine, groups, params, sizes.timed_steps, sizes.warm_steps)
    with parts_alone():
        alone = decode(llm.engine, groups[:1], params, sizes.timed_steps, sizes.warm_steps)
    return Cell(decoded, alone)


def prompts_of(llm: LLM, number: int, num_tokens: int) -> Iterator[list[int]]:
    """Code that the model was not trained on, up to a function that it has to write."""
    tokenizer = llm.get_tokenizer()
    for text in islice(cycle(heldout.texts()), number):
        yield tokenizer.encode(text)[-num_tokens:]
