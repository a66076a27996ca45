"""A training run, from settings to a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import attrs
import numpy as np
import torch
from tqdm import tqdm

from specdec_core import (
    ConfigError,
    EngineConfig,
    ProposerSpec,
    TrainingBatch,
    TrainingRecipe,
    load_tokenizer,
    load_training_target,
)
from specdec_train import data, files
from specdec_train.batches import Order, collate
from specdec_train.curves import can_draw, draw
from specdec_train.data import Text, Window
from specdec_train.evaluate import acceptance_lengths
from specdec_train.features import features_of, weights_fingerprint
from specdec_train.generate import generated_texts
from specdec_train.interrupts import Interrupts, noticing
from specdec_train.optimizers import optimizers
from specdec_train.resume import METHOD, saved_state
from specdec_train.settings import Settings, plain, prepare_folder
from specdec_train.start import start_from
from specdec_train.store import FeatureStore, open_store

MOST_HELD_OUT = 64


def train(spec: ProposerSpec, settings: Settings, options: Any) -> None:
    """Train a draft model for a speculative decoding method, and save its checkpoint in settings.out.

    With `settings.resume`, a killed run continues from its last save and ends with the same weights as an uninterrupted
    one.

    spec: the method.
    options: the options of the method's training recipe, an instance of `spec.train.options`.

    Raises ConfigError for wrong settings or data, CompatibilityError if the method cannot be trained for the target.
    """
    recipe = spec.train
    if recipe is None:
        raise ConfigError(f"the method {spec.name!r} has no training recipe: choose another")
    for path in (*settings.data, *settings.held_out):
        data.files_in(path)  # a misspelt name is reported before the target is loaded
    prepare_folder(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    with files.lock(settings.out), noticing() as interrupts:
        Run(spec, recipe, settings, options, interrupts).go()


class Run:
    """The training loop and its state."""

    def __init__(
        self, spec: ProposerSpec, recipe: TrainingRecipe, settings: Settings, options: Any, interrupts: Interrupts
    ) -> None:
        self._method, self._recipe, self._settings, self._interrupts = spec.name, recipe, settings, interrupts
        self._target = load_training_target(settings.target, settings.dtype, settings.device)
        self._taps = tuple(dict.fromkeys([*recipe.taps(options, self._target.info), "final"]))
        if settings.start is not None and settings.generate and not (settings.out / files.STATE).exists():
            trial = recipe.make(options, self._target, torch.ones(self._target.info.vocab_size, dtype=torch.int64))
            start_from(settings.start, trial, spec, options)  # a misfit is refused before hours of generating
            del trial
        self._learned, self._held_out = self._read_data()
        self._windows = data.windows(self._learned, settings.window)
        self._order = Order(tuple(each.stop - each.start for each in self._windows), settings.batch, settings.seed)
        self._checked = {
            METHOD: spec.name,
            **settings.identity(),
            **{name: plain(value) for name, value in attrs.asdict(options, recurse=False).items()},
            "the texts": data.fingerprint(self._learned),
            "the target's weights": weights_fingerprint(self._target),
        }
        saved = saved_state(settings, self._checked)
        counts = torch.from_numpy(data.token_counts(self._learned, self._target.info.vocab_size))
        torch.manual_seed(settings.seed)
        self._trainee = recipe.make(options, self._target, counts)
        if settings.start is not None:  # the checkpoint of a run that is resumed has the sizes of its start
            is_saved = saved is not None and files.has_checkpoint(settings.out)
            start_from(str(settings.out.resolve()) if is_saved else settings.start, self._trainee, spec, options)
        self._trainee.to(self._target.info.device)
        self._optimizers = optimizers(self._trainee, settings, self._target.info.dtype)
        self._step, self._saved, self._num_tokens, self._seconds = 0, 0, 0, 0.0
        if saved is not None:
            self._restore(saved)
        self._log = files.Log(settings.out, self._step)
        self._store = self._open_store()

    def go(self) -> None:
        settings, started = self._settings, monotonic() - self._seconds
        bar = tqdm(total=settings.steps, initial=self._step, desc=self._method, unit="step")
        with bar, self._reporting_interrupts():
            if self._step == 0:
                self._evaluate()
            while self._step < settings.steps:
                self._interrupts.check()
                values = self._update()
                self._step += 1
                self._seconds = monotonic() - started
                bar.update()
                if self._step % settings.log_every == 0 or self._step == settings.steps:
                    found = {name: round(float(value), 5) for name, value in values.items()}
                    bar.set_postfix(loss=f"{found['loss']:.3f}")
                    where = {"step": self._step, "tokens": self._num_tokens, "seconds": round(self._seconds, 1)}
                    self._log.write(**where, lr=self._learning_rate(self._step - 1), **found)
                is_last = self._step == settings.steps
                if is_last or (settings.evaluate_every and self._step % settings.evaluate_every == 0):
                    self._evaluate()
                if is_last or self._step % settings.save_every == 0:
                    self._save()
            if not files.has_checkpoint(settings.out):  # of a finished run, only the state was left
                files.write_checkpoint(settings.out, self._trainee)
        config = {"method": self._method, "model": str(settings.out)}
        tqdm.write(f"the draft is in {str(settings.out)!r}: LLM({settings.target!r}, speculative_config={config})")

    @contextmanager
    def _reporting_interrupts(self) -> Iterator[None]:
        try:
            yield
            self._interrupts.check()
        except KeyboardInterrupt:
            then = f"--resume continues after step {self._saved}" if self._saved else "nothing was saved yet"
            step, steps = self._step, self._settings.steps
            tqdm.write(f"interrupted in step {min(step + 1, steps)} of {steps}: {then}")
            raise

    def _update(self) -> dict[str, torch.Tensor]:
        """Make one optimizer step and return {name: scalar} for the log. The step depends only on its index, the
        weights and the optimizers' state, so a resumed run repeats it exactly."""
        torch.manual_seed(int(np.random.SeedSequence([self._settings.seed, self._step]).generate_state(1)[0]))
        self._trainee.train()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate(self._step) * group["scale"]
            optimizer.zero_grad(set_to_none=True)
        windows = [self._windows[row] for row in self._order.rows(self._step)]
        texts = [self._learned[each.row].part(each.start, each.stop) for each in windows]
        batch = self._batch(texts, windows)
        loss, metrics = self._loss(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._trainee.parameters(), self._settings.clip)
        for what, value in (("loss", loss), ("gradient's norm", norm)):
            if not torch.isfinite(value):
                raise ConfigError(
                    f"the {what} is {float(value)} in step {self._step}: lower --lr, or use another --dtype. The last "
                    f"save is intact"
                )
        for optimizer in self._optimizers:
            optimizer.step()
        self._num_tokens += sum(len(text.token_ids) for text in texts)
        values = {"loss": loss, "gradient_norm": norm, **metrics}
        return {name: value.detach() for name, value in values.items()}

    def _loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        with torch.autocast(self._target.info.device.type, torch.bfloat16, enabled=self._settings.autocast):
            loss, metrics = self._trainee(batch)
        return loss, metrics

    def _batch(self, texts: Sequence[Text], windows: Sequence[Window] | None = None) -> TrainingBatch:
        """Return a training batch: the texts' token ids, their loss masks and the target's hidden states. windows:
        where the texts are in the feature store, from which their hidden states are read. None: the texts are not in
        the store, so their hidden states are computed."""
        device = self._target.info.device
        token_ids, counts = collate(texts, device)
        if self._store is None or windows is None:
            return TrainingBatch(token_ids, counts, features_of(self._target, token_ids, self._taps))
        return TrainingBatch(token_ids, counts, {k: v.to(device) for k, v in self._store.read(windows).items()})

    def _learning_rate(self, step: int) -> float:
        settings = self._settings
        peak, num_warmup = settings.lr or self._recipe.learning_rate, round(settings.warmup * settings.steps)
        if step < num_warmup:
            return peak * (step + 1) / num_warmup
        progress = (step - num_warmup) / max(1, settings.steps - num_warmup)
        return peak * (settings.final_lr + (1 - settings.final_lr) * (1 + math.cos(math.pi * progress)) / 2)

    def _evaluate(self) -> None:
        settings = self._settings
        self._trainee.eval()
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            size = settings.texts_at_once
            parts = [self._held_out[i : i + size] for i in range(0, len(self._held_out), size)]
            loss = sum(self._held_out_loss(part) * len(part) for part in parts) / len(self._held_out)
        values: dict[str, Any] = {"held_out_loss": round(loss, 5)}
        prompts = self._prompts()
        if prompts:
            lengths = acceptance_lengths(
                self._trainee,
                settings.target,
                {"method": self._method, **self._recipe.evaluation},
                prompts,
                min(settings.eval_tokens, self._target.info.max_model_len - max(map(len, prompts))),
                dtype=settings.dtype,
                device=settings.device,
                seed=settings.seed,
                check=self._interrupts.check,
            )
            values["acceptance_length"] = {name: round(length, 4) for name, length in lengths.items()}
            measured = ", ".join(f"{length:.2f} {name.replace('_', ' ')}" for name, length in lengths.items())
            tqdm.write(f"step {self._step}: held-out loss {loss:.3f}, acceptance length {measured}")
        self._log.write(step=self._step, **values)
        if can_draw():
            draw(self._log.read(), settings.out / "curves.png")
        elif self._step == settings.steps:
            tqdm.write("no curves.png: it needs matplotlib, which is not installed")

    def _held_out_loss(self, texts: Sequence[Text]) -> float:
        self._interrupts.check()
        return float(self._loss(self._batch(texts))[0])

    def _prompts(self) -> list[list[int]]:
        chosen = self._held_out[: self._settings.eval_prompts]
        most = min(self._settings.prompt_len, self._target.info.max_model_len // 2)
        return [text.token_ids[: min(most, max(2, len(text.token_ids) // 2))].tolist() for text in chosen]

    def _save(self) -> None:
        out = self._settings.out
        files.write_checkpoint(out, self._trainee)
        state = {
            "checked": self._checked,
            "step": self._step,
            "num_tokens": self._num_tokens,
            "seconds": self._seconds,
            "trainee": self._trainee.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        files.write_state(out, state)
        self._saved = self._step

    def _restore(self, state: dict[str, Any]) -> None:
        self._trainee.load_state_dict(state["trainee"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._step = self._saved = state["step"]
        self._num_tokens, self._seconds = state["num_tokens"], state["seconds"]

    def _read_data(self) -> tuple[list[Text], list[Text]]:
        """Return the training texts and the held-out texts. Raises ConfigError if there are too few, or if
        settings.length exceeds the target's maximum length."""
        settings, info = self._settings, self._target.info
        if settings.length > info.max_model_len:
            raise ConfigError(
                f"length={settings.length}, but the target takes {info.max_model_len} tokens at most: lower it"
            )
        tokenizer = _tokenizer(settings.target)
        texts = data.read_texts(settings.data, tokenizer, info.vocab_size)
        if settings.generate:
            description: dict[str, object] = {"texts": data.fingerprint(texts)}
            description |= {name: settings.identity()[name] for name in _GENERATION}
            file = settings.out / "generated.jsonl"
            check = self._interrupts.check
            texts = generated_texts(settings, texts, file, description, info.max_model_len, check)
        pieces = data.cut(texts, settings.length)
        if settings.held_out:
            held_out = data.cut(data.read_texts(settings.held_out, tokenizer, info.vocab_size), settings.length)
        else:
            num_held_out = min(MOST_HELD_OUT, max(1, len(pieces) // 50))
            pieces, held_out = pieces[:-num_held_out], pieces[-num_held_out:]
        if not pieces or not held_out:
            raise ConfigError(
                f"there is too little data: {len(pieces)} training texts of at least {data.SHORTEST} tokens, and "
                f"{len(held_out)} held-out ones. Give more"
            )
        return pieces, held_out[:MOST_HELD_OUT]

    def _open_store(self) -> FeatureStore | None:
        if self._settings.features is None:
            return None
        check, size = self._interrupts.check, self._settings.texts_at_once
        return open_store(self._settings.features, self._learned, self._target, self._taps, size, check)


_GENERATION = ("target", "dtype", "generate", "prompt_len", "temperature", "seed")


def _tokenizer(target: str) -> Any:
    """Return the target's tokenizer. None if it has no tokenizer; the data must then be token ids."""
    try:
        return load_tokenizer(EngineConfig(model=target))
    except ConfigError:
        return None
