"""A script that tries out installed distributions: `python uses.py WEIGHTS NAME ...`. Run it with the Python of the
environment in which they are installed.

WEIGHTS is the folder of the embedded model's weights. Each NAME is a distribution to try out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.request import Request, urlopen

FIXED = {"adaptive_draft_length": False}  # what pays depends on measured times
PROMPT = "def mean(values):\n    return sum(values) / len(values)\n\n\ndef mean("


def complete(model: str, **keywords: object) -> object:
    """Generate greedily from PROMPT with a model. Returns the output.

    keywords: further keyword arguments of `LLM`.
    """
    from specdec_core import LLM, SamplingParams

    (output,) = LLM(model, **keywords).generate(PROMPT, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 24
    return output


def command(*arguments: str) -> str:
    """Run the command `spec-decode` of this Python's environment and assert that it succeeds. Returns its standard
    output."""
    line = [str(Path(sys.executable).with_name("spec-decode")), *arguments]
    result = subprocess.run(line, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{line}: {result.stdout}{result.stderr}"
    return result.stdout


def draft(method: str) -> Callable[[str], None]:
    def use(weights: str) -> None:
        output = complete(weights, speculative_config={"method": method, "num_speculative_tokens": 4})
        assert output.speculation.num_draft_tokens > 0

    return use


def random_head(method: str, config: dict[str, object], shapes: dict[str, tuple[int, ...]]) -> Callable[[str], None]:
    """Return a function that drafts with a head of random weights, for methods without a head beside the weights.

    shapes: of the head's tensors, by their published names.
    """

    def use(weights: str) -> None:
        import torch
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory() as folder:
            target = json.loads(Path(weights, "config.json").read_text(encoding="utf-8"))
            Path(folder, "config.json").write_text(json.dumps(target | config), encoding="utf-8")
            save_file({name: torch.randn(shape) for name, shape in shapes.items()}, Path(folder, "model.safetensors"))
            output = complete(weights, speculative_config={"method": method, "model": folder, **FIXED})
        assert output.speculation.num_draft_tokens > 0

    return use


HIDDEN, VOCAB = 256, 8192
MLP_SPECULATOR = {
    **{f"speculator.{kind}.0.weight": (VOCAB, 8) for kind in ("emb", "head")},
    "speculator.proj.0.weight": (8, HIDDEN),
    "speculator.proj.1.weight": (8, 8),
    **{f"speculator.ln.0.{kind}": (8,) for kind in ("weight", "bias")},
}
MEDUSA = {"blocks.0.layers.0.weight": (HIDDEN, HIDDEN), "lm_heads.0.weight": (VOCAB, HIDDEN)}
MTP = {
    **{f"model.layers.8.{name}.weight": (HIDDEN,) for name in ("enorm", "hnorm", "shared_head.norm")},
    **{f"model.layers.8.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")},
    **{f"model.layers.8.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in ("q", "o")},
    **{f"model.layers.8.self_attn.{name}_proj.weight": (128, HIDDEN) for name in ("k", "v")},
    **{f"model.layers.8.mlp.{name}_proj.weight": (1024, HIDDEN) for name in ("gate", "up")},
    "model.layers.8.mlp.down_proj.weight": (HIDDEN, 1024),
    "model.layers.8.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
}


def use_core(weights: str) -> None:
    complete(weights)
    assert [plugin["name"] for plugin in json.loads(command("plugins", "--json"))] == ["builtin"]


def use_kernels(weights: str) -> None:
    complete(weights)
    from specdec_core import Plugins
    from specdec_core.ops import REFERENCE
    from specdec_kernels import cpu

    assert set(cpu.OPS) <= set(REFERENCE)
    assert "ops" in next(plugin.provides for plugin in Plugins.load().listing() if plugin.name == "kernels")


def use_prefix(weights: str) -> None:
    from specdec_core import LLM, SamplingParams

    llm = LLM(weights, kv_manager="prefix", block_size=4)
    params = SamplingParams(temperature=0, max_tokens=4)
    cached = [llm.generate(PROMPT, params, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert cached[0] == 0 < cached[1]


def use_prediction(weights: str) -> None:
    from specdec_core import LLM, SamplingParams

    llm = LLM(weights, speculative_config={"method": "prediction"})
    (first,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=8, prediction=first.outputs[0].token_ids)
    assert llm.generate(PROMPT, params, use_tqdm=False)[0].speculation.num_accepted > 0


def use_grammar(weights: str) -> None:
    from specdec_core import LLM, SamplingParams

    (output,) = LLM(weights).generate(
        PROMPT, SamplingParams(temperature=0, structured_outputs={"choice": ["values", "other"]}), use_tqdm=False
    )
    assert output.outputs[0].text in ("values", "other")


def use_model(weights: str) -> None:
    """Load and run the embedded model of specdec_model_tiny with transformers alone, without specdec."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from specdec_model_tiny import model_path

    prompt = AutoTokenizer.from_pretrained(model_path())(PROMPT, return_tensors="pt")
    written = AutoModelForCausalLM.from_pretrained(model_path()).generate(**prompt, max_new_tokens=4, do_sample=False)
    assert written.shape[1] == prompt["input_ids"].shape[1] + 4


def use_model_by_name(weights: str) -> None:
    complete("tiny")


def use_server(weights: str) -> None:
    line = [str(Path(sys.executable).with_name("spec-decode")), "serve", weights, "--port", "0"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = next(each for each in process.stderr if each.startswith("Serving ")).split()[3].rstrip(".")
            body = json.dumps({"prompt": PROMPT, "max_tokens": 4}).encode()
            with urlopen(Request(f"{url}/completions", body, {"Content-Type": "application/json"})) as response:
                assert json.load(response)["usage"]["completion_tokens"] == 4
            with urlopen(url.removesuffix("v1")) as response:
                assert response.headers["Content-Type"].startswith("text/html")
        finally:
            process.terminate()
            rest = process.communicate()[1]
    assert process.returncode == 0, rest


def use_testing(weights: str) -> None:
    """Run the conformance tests of specdec-testing on a proposer, which is a module in the working directory.

    The options and fixtures of these tests come from the pytest plugin of specdec-testing.
    """
    kit = ["--pyargs", "specdec_testing.conformance", "--specdec-proposer", "recent", "--specdec-module", "recent"]
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "test_is_offered or test_plan_is_pure",
        *kit,
    ]
    result = subprocess.run(line, capture_output=True, text=True, check=False)
    assert "2 passed" in result.stdout, result.stdout + result.stderr


def use_tools(weights: str) -> None:
    assert "--method" in command("bench", "--help")
    assert "ngram" in command("demo", "--help")
    command("explain", "--model", weights, "--max-tokens", "1", "--html", "found.html", "x")  # reads its template


def use_train(weights: str) -> None:
    assert "Commands:" not in command("train", "--help")  # no method is installed


def use_vllm(weights: str) -> None:
    """Without vLLM and without a proposer, up to the error that names the package to install."""
    from types import SimpleNamespace

    from specdec_core import PluginError
    from specdec_vllm import Proposer

    os.environ["SPECDEC_VLLM_PROPOSER"] = "suffix"
    model = SimpleNamespace(
        model=weights, max_model_len=64, dtype=None, get_vocab_size=lambda: VOCAB, get_hidden_size=lambda: HIDDEN,
        hf_text_config=SimpleNamespace(model_type="llama", num_hidden_layers=8),
    )  # fmt: skip
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
        model_config=model,
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    message = ""
    try:
        Proposer(config)
    except PluginError as error:
        message = str(error)
    assert "install specdec-proposer-suffix" in message, message


def use_train_of_eagle(weights: str) -> None:
    listed = command("train", "--help").split()
    assert {"eagle", "eagle3"} <= set(listed)
    assert "--target" in command("train", "eagle3", "--help")


def use_transformers(weights: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from specdec_core import Plugins
    from specdec_transformers import speculative

    model = AutoModelForCausalLM.from_pretrained(weights)
    prompt = torch.tensor([AutoTokenizer.from_pretrained(weights).encode(PROMPT)])
    faster = speculative({"method": "recent", "num_speculative_tokens": 4}, plugins=Plugins.load(modules=["recent"]))
    plain = model.generate(prompt, max_new_tokens=24)
    assert model.generate(prompt, max_new_tokens=24, custom_generate=faster).tolist() == plain.tolist()
    assert faster.counts.num_accepted > 0


USES: dict[tuple[str, ...], Callable[[str], None]] = {
    ("specdec-core",): use_core,
    ("specdec-grammar",): use_grammar,
    ("specdec-kernels",): use_kernels,
    ("specdec-kv-prefix",): use_prefix,
    ("specdec-model-tiny",): use_model,
    ("specdec-model-tiny", "specdec-core"): use_model_by_name,
    ("specdec-proposer-draft",): draft("draft_model"),
    ("specdec-proposer-eagle",): draft("eagle3"),
    ("specdec-proposer-medusa",): random_head("medusa", {"model_type": "medusa", "num_hidden_layers": 1}, MEDUSA),
    ("specdec-proposer-mlp",): random_head(
        "mlp_speculator", {"emb_dim": HIDDEN, "inner_dim": 8, "n_predict": 2, "tie_weights": True}, MLP_SPECULATOR
    ),
    ("specdec-proposer-mtp",): random_head("mtp", {"num_nextn_predict_layers": 1}, MTP),
    ("specdec-proposer-ngram",): draft("ngram"),
    ("specdec-proposer-prediction",): use_prediction,
    ("specdec-proposer-suffix",): draft("suffix"),
    ("specdec-server",): use_server,
    ("specdec-testing",): use_testing,
    ("specdec-tools",): use_tools,
    ("specdec-train",): use_train,
    ("specdec-transformers",): use_transformers,
    ("specdec-train", "specdec-kernels", "specdec-proposer-eagle"): use_train_of_eagle,
    ("specdec-vllm",): use_vllm,
}
"""{distributions to install together: function that tries them, given the folder of the weights}."""


if __name__ == "__main__":
    USES[tuple(sys.argv[2:])](sys.argv[1])
