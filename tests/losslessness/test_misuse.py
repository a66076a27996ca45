"""What callers and plugins do wrong stays their problem: it is reported, and every other request is as it would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from reference import NUM_TOKENS

from specdec_core import LLM, ConfigError, Draft, PluginError, ProposerSpec, SamplingParams, SpecdecError

pytestmark = pytest.mark.parametrize("model_dir", ["llama"], indirect=True, scope="session")
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def run(engine: Any) -> None:
    while engine.has_unfinished:
        engine.step()


def outputs_of(requests: dict[int, Any]) -> dict[int, list[int]]:
    return {i: request.output_token_ids for i, request in requests.items()}


def test_a_listener_that_raises_harms_nobody(model_dir: Any, make_llm: Any, prompts: list, references: list) -> None:
    engine = make_llm(model_dir, "ngram").engine
    finished: dict[int, Any] = {}
    raised = []

    def listen(index: int) -> Callable[..., None]:
        def listener(request: Any, pieces: Any) -> None:
            if index == 1 and not raised:
                raised.append(index)
                raise ZeroDivisionError("a bug in this listener")
            if request.finish_reason is not None:
                finished[index] = request

        return listener

    for i in range(4):
        engine.add_request(prompts[i], PARAMS, listen(i))
    with pytest.raises(ZeroDivisionError):
        run(engine)
    run(engine)
    assert outputs_of(finished) == dict(enumerate(references[:4]))


def test_a_listener_may_cancel_another_request_and_step(
    model_dir: Any, make_llm: Any, prompts: list, references: list
) -> None:
    engine = make_llm(model_dir, "ngram").engine
    finished: dict[int, Any] = {}
    ids: list[str] = []

    def listen(index: int) -> Callable[..., None]:
        def listener(request: Any, pieces: Any) -> None:
            if index == 0 and len(request.output_token_ids) > 3:
                engine.cancel(ids[2])
                engine.step()
            if request.finish_reason is not None:
                finished[index] = request

        return listener

    ids += [engine.add_request(prompts[i], PARAMS, listen(i)) for i in range(4)]
    run(engine)
    assert finished.pop(2).finish_reason == "abort"
    assert outputs_of(finished) == {i: references[i] for i in (0, 1, 3)}
    engine.kv.check_integrity()


@pytest.mark.parametrize(
    "prompt",
    [[], [1.5], [True], [[1, 2]], ["a"], [2**70], [-1], [[1], [1, 2]], np.zeros((2, 2), dtype=np.int64), None],
    ids=repr,
)
def test_prompts_that_are_none(model_dir: Any, make_llm: Any, prompt: Any) -> None:
    llm = make_llm(model_dir, None)
    with pytest.raises(SpecdecError, match="prompt"):
        llm.generate([{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": prompt}], PARAMS, use_tqdm=False)
    assert not llm.engine.has_unfinished


def test_sampling_params_of_another_type(model_dir: Any, make_llm: Any, prompts: list) -> None:
    llm = make_llm(model_dir, None)
    with pytest.raises(ConfigError, match="sampling_params"):
        llm.generate([{"prompt_token_ids": prompts[0]}] * 2, [PARAMS, {}], use_tqdm=False)
    assert not llm.engine.has_unfinished


@attrs.frozen
class NoOptions:
    pass


def tensors(token_ids: Any, parents: Any, offsets: Any, **more: Any) -> Draft:
    return Draft(token_ids=torch.tensor(token_ids), parents=parents, offsets=offsets, max_depth=2, **more)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


MALFORMED = {
    "too many nodes": lambda: Draft.from_chains([[1] * 9]),
    "a tree too many": lambda: Draft.from_chains([[1], [1]]),
    "token ids out of the vocabulary": lambda: Draft.from_chains([[1, 10**6]]),
    "negative token ids": lambda: Draft.from_chains([[-1]]),
    "parents of the wrong type": lambda: tensors([1, 2], torch.tensor([-1, 0]), (0, 2)),
    "too few parents": lambda: tensors([1, 2], int32(-1), (0, 2)),
    "a parent that comes later": lambda: tensors([1, 2], int32(1, -1), (0, 2)),
    "offsets that do not end with the nodes": lambda: tensors([1, 2], int32(-1, 0), (0, 1)),
    "a tree that claims to be a chain": lambda: tensors([1, 2], int32(-1, -1), (0, 2), is_chain=True),
    "no draft at all": lambda: None,
}


@pytest.mark.parametrize("malformed", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_drafts_are_named(model_dir: Any, prompts: list, malformed: Callable[[], Any]) -> None:
    from specdec_core import Proposer

    class Careless(Proposer):
        def propose(self, batch: Any) -> Any:
            return malformed()

    llm = careless_llm(model_dir, build=lambda config, context: Careless())
    with pytest.raises(PluginError, match="'careless' failed"):
        llm.generate({"prompt_token_ids": prompts[1]}, PARAMS, use_tqdm=False)
    assert not llm.engine.has_unfinished
    llm.engine.kv.check_integrity()
    undrafted = attrs.evolve(PARAMS, num_speculative_tokens=0)
    (output,) = llm.generate({"prompt_token_ids": prompts[1]}, undrafted, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == NUM_TOKENS


def careless_llm(model_dir: Any, **spec: Any) -> LLM:
    from specdec_core import Plugins

    class PluginsWithCareless:
        def __init__(self) -> None:
            self._installed = Plugins.load()

        def proposer(self, name: str) -> ProposerSpec:
            return ProposerSpec("careless", NoOptions, api=1, **spec)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._installed, name)

    return LLM(
        str(model_dir),
        skip_tokenizer_init=True,
        max_model_len=128,
        plugins=PluginsWithCareless(),
        speculative_config={"method": "careless", "num_speculative_tokens": 5},
    )


def test_a_proposer_that_cannot_be_built_or_planned_is_named(model_dir: Any) -> None:
    def fail(*args: Any) -> Any:
        raise ZeroDivisionError("a bug in this plugin")

    with pytest.raises(PluginError, match="'careless' could not be built: ZeroDivisionError"):
        careless_llm(model_dir, build=fail)
    with pytest.raises(PluginError, match="'careless' could not plan what it needs: ZeroDivisionError"):
        careless_llm(model_dir, build=fail, plan=fail)
    with pytest.raises(PluginError, match="plan returned None"):
        careless_llm(model_dir, build=fail, plan=lambda *args: None)


def test_a_proposer_that_exits_does_not_end_the_program(model_dir: Any, prompts: list) -> None:
    from specdec_core import Proposer

    class Leaving(Proposer):
        def propose(self, batch: Any) -> Any:
            raise SystemExit(3)

    llm = careless_llm(model_dir, build=lambda config, context: Leaving())
    with pytest.raises(PluginError, match="SystemExit"):
        llm.generate({"prompt_token_ids": prompts[1]}, PARAMS, use_tqdm=False)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(model_dir: Any, tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors_of_it = load_file(model_dir / "model.safetensors")
    del tensors_of_it["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors_of_it, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    with pytest.raises(SpecdecError, match="up_proj"):
        LLM(str(tmp_path), skip_tokenizer_init=True)


def test_a_folder_without_weights_is_refused(model_dir: Any, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    with pytest.raises(ConfigError, match="weights"):
        LLM(str(tmp_path), skip_tokenizer_init=True)


@pytest.mark.parametrize(
    "content", [b"", b"junk", b"\x10" + b"\0" * 7 + b"{}", None], ids=["empty", "junk", "header", "cut"]
)
def test_weights_that_cannot_be_read_are_reported(model_dir: Any, tmp_path: Any, content: bytes | None) -> None:
    whole = (model_dir / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2] if content is None else content)
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    with pytest.raises(ConfigError, match="weights"):
        LLM(str(tmp_path), skip_tokenizer_init=True)


def test_a_pickle_that_runs_code_is_refused(model_dir: Any, tmp_path: Any) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "owned"), "w")

    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    with (tmp_path / "pytorch_model.bin").open("wb") as stream:
        pickle.dump(Evil(), stream)
    with pytest.raises(ConfigError, match="weights"):
        LLM(str(tmp_path), skip_tokenizer_init=True)
    assert not (tmp_path / "owned").exists()


def test_remote_code_needs_a_plain_yes(model_dir: Any) -> None:
    with pytest.raises(ConfigError, match="trust_remote_code='no'"):
        LLM(str(model_dir), trust_remote_code="no")
