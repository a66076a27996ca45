"""Measures every method end to end, with `spec-decode bench`: chains and trees, chosen and sampled. At temperature 1,
draft tokens are sampled where nothing else is said.

    python benchmarks/learned.py [--drafts DIR] [--humaneval FILE]     # writes benchmarks/results/learned.json

The prompts are held-out code (heldout.py) and, if given, those in FILE: HumanEval's .jsonl file, or another one with
the key `prompt`. None of the prompts is in the training data. DIR has a subfolder of weights for each method, such as
DIR/eagle3. By default the engine uses the weights that come with the model.

The held-out prompts are also completed greedily by a copy of the model that has several times as many layers but
generates the same tokens (inflate.py). The copy shows the speed-up for a model whose forward pass costs more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import heldout
from attrs import frozen
from inflate import DEFAULT_TIMES, inflate
from measuring import RESULTS, command, write

from specdec_core import resolve_model
from specdec_tools.files import read_prompts

SHAPE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)]"
CHAIN: dict[str, Any] = {"num_speculative_tokens": 5}
TREE: dict[str, Any] = {"eagle_topk": 4, "eagle_depth": 4, "num_speculative_tokens": 15}  # the depth of the chain
LARGE_TREE: dict[str, Any] = {"eagle_topk": 10, "eagle_depth": 7, "num_speculative_tokens": 59}  # EAGLE-2's authors'
OWN: dict[str, Any] = {"eagle_context_tokens": 0}
SAMPLED: dict[str, Any] = {"draft_sample_method": "probabilistic"}
CHOSEN: dict[str, Any] = {"draft_sample_method": "greedy"}
FIXED: dict[str, Any] = {"adaptive_draft_length": False}  # the method's default number in every step
AS_IT_IS = "as it is"
GREEDY, EITHER, ONE = (0.0,), (0.0, 1.0), (1.0,)


class Way(NamedTuple):
    """A speculative configuration, and the temperatures at which it is measured."""

    name: str
    speculative_config: dict[str, Any]
    temperatures: tuple[float, ...]


WAYS = (
    Way("draft model, chain", {"method": "draft_model", **CHAIN}, EITHER),
    Way("draft model, chosen chain", {"method": "draft_model", **CHAIN, **CHOSEN}, ONE),
    Way("EAGLE, chain", {"method": "eagle", "eagle_topk": 1, **CHAIN}, EITHER),
    Way("EAGLE, dynamic tree", {"method": "eagle", **TREE}, EITHER),
    Way("EAGLE-3, chain", {"method": "eagle3", "eagle_topk": 1, **CHAIN}, EITHER),
    Way("EAGLE-3, chain of its own tokens", {"method": "eagle3", "eagle_topk": 1, **CHAIN, **OWN}, EITHER),
    Way("EAGLE-3, dynamic tree", {"method": "eagle3", **TREE}, EITHER),
    Way("EAGLE-3, large dynamic tree", {"method": "eagle3", **LARGE_TREE}, EITHER),
    Way("EAGLE-3, default tree", {"method": "eagle3", **FIXED}, EITHER),
    Way("EAGLE-3, short chain", {"method": "eagle3", "eagle_topk": 1, "num_speculative_tokens": 3}, GREEDY),
    Way("EAGLE-3, chosen chain", {"method": "eagle3", "eagle_topk": 1, **CHAIN, **CHOSEN}, ONE),
    Way("EAGLE-3, sampled tree", {"method": "eagle3", "speculative_token_tree": SHAPE, **SAMPLED, **FIXED}, ONE),
    Way("MTP, chain", {"method": "mtp", **CHAIN}, EITHER),
    Way("MTP, chosen chain", {"method": "mtp", **CHAIN, **CHOSEN}, ONE),
    Way("MLP speculator, chain", {"method": "mlp_speculator", **FIXED}, EITHER),
    Way("MLP speculator, tree", {"method": "mlp_speculator", "n_candidates": 5, **FIXED}, EITHER),
    Way("Medusa, tree", {"method": "medusa", **FIXED}, EITHER),
    Way("Medusa, large tree", {"method": "medusa", "num_speculative_tokens": 63, **CHOSEN}, EITHER),  # as on a GPU
    Way("n-grams", {"method": "ngram", **CHAIN}, EITHER),
    Way("suffix tree", {"method": "suffix", "suffix_decoding_max_cached_requests": 0, **FIXED}, EITHER),
)


@frozen
class Bench:
    """A callable that runs `spec-decode bench` in a separate process and returns its JSON results.

    folder: where the configuration file and the results of that process are written.
    runs, max_tokens, batch_size: options of `spec-decode bench`.
    """

    folder: Path
    runs: int
    max_tokens: int
    batch_size: int = 1

    def __call__(self, model: Path, prompts: Path, speculative_config: dict[str, Any], temperature: float) -> Any:
        config, output = self.folder / "config.json", self.folder / "output.json"
        config.write_text(json.dumps({"model": str(model), "speculative_config": speculative_config}), encoding="utf-8")
        options = {
            "--config": config,
            "--prompts": prompts,
            "--output": output,
            "--runs": self.runs,
            "--max-tokens": self.max_tokens,
            "--batch-size": self.batch_size,
            "--temperature": temperature,
        }
        words = [str(word) for option in options.items() for word in option]
        subprocess.run([sys.executable, "-m", "specdec_core", "bench", *words], check=True)
        return json.loads(output.read_text(encoding="utf-8"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--drafts", type=Path)
    parser.add_argument("--humaneval", type=Path, metavar="FILE")
    parser.add_argument("--most-prompts", type=int, default=20, help="of FILE")
    parser.add_argument("--only", default="", help="ways with this in their names")
    parser.add_argument("--times", type=int, default=DEFAULT_TIMES, help="as deep; 1: no copy")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the output has already")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULTS / "learned.json")
    return parser.parse_args()


def prompt_files(args: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Write each set of prompts to a file in `folder`: the held-out prompts and, with --humaneval, those of HumanEval.

    Returns {name of the set: file}.
    """
    files = {"held-out": folder / "held-out.jsonl"}
    heldout.write_prompts(files["held-out"])
    if args.humaneval is not None:
        files["HumanEval"] = folder / "humaneval.jsonl"
        lines = [json.dumps({"prompt": p.text, "task_id": p.title}) for p in read_prompts(args.humaneval)]
        files["HumanEval"].write_text("\n".join(lines[: args.most_prompts]) + "\n", encoding="utf-8")
    return files


def targets(args: argparse.Namespace, folder: Path) -> dict[str, Path]:
    model = Path(resolve_model(args.model))
    found = {AS_IT_IS: model}
    if args.times > 1:
        found["deep"] = folder / "deep"
        inflate(model, found["deep"], args.times, args.drafts)
    return found


@frozen
class Setting:
    """What one row of the results measures: a target model, a set of prompts, a configuration and a temperature.

    target: AS_IT_IS for the unchanged checkpoint, or "deep" for one to which layers were added.
    prompts: name of the set of prompts.
    way: the speculative configuration.
    """

    target: str
    prompts: str
    way: Way
    temperature: float

    @property
    def key(self) -> dict[str, Any]:
        return {"target": self.target, "prompts": self.prompts, "way": self.way.name, "temperature": self.temperature}


def settings(args: argparse.Namespace, prompts: Iterable[str], targets: Iterable[str]) -> Iterator[Setting]:
    for target in targets:
        for name in prompts if target == AS_IT_IS else ["held-out"]:
            for way in WAYS:
                for temperature in way.temperatures if args.only in way.name else ():
                    if target == AS_IT_IS or not temperature:
                        yield Setting(target, name, way, temperature)


def measure(args: argparse.Namespace, folder: Path, record: dict[str, Any]) -> None:
    """Measure every setting that has no row in `record` yet, and add its row.

    folder: where temporary files are written.
    record: the results. It is saved after every setting, since a whole run takes hours.
    """
    bench, models, files = Bench(folder, args.runs, args.max_tokens), targets(args, folder), prompt_files(args, folder)
    done = [{key: row[key] for key in ("target", "prompts", "way", "temperature")} for row in record["rows"]]
    for setting in settings(args, files, models):
        if setting.key in done:
            continue
        print(*setting.key.values(), sep=", ", flush=True)
        own = setting.way.speculative_config
        config = dict(own)
        draft = None if args.drafts is None else args.drafts / own["method"]
        # The copy has drafts in its own folder, MTP modules are in the target's checkpoint, and some methods have none.
        if draft is not None and draft.is_dir() and setting.target == AS_IT_IS:
            config["model"] = str(draft)
        found = bench(models[setting.target], files[setting.prompts], config, setting.temperature)
        row = {**setting.key, "speculative_config": own, **found["total"]}
        record["rows"].append(row | ({"groups": found["groups"]} if len(found["groups"]) > 1 else {}))
        record["num_prompts"][setting.prompts] = len(found["batches"])
        machine = {key: found["machine"][key] for key in ("device", "processor", "threads")}
        record |= {"machine": machine, "dtype": found["model"]["dtype"]}
        record["versions"] |= found["versions"]
        write(record, args.out)


def main() -> None:
    args = arguments()
    record: dict[str, Any] = {
        "command": command("learned.py").replace(" --resume", ""),
        "runs": args.runs,
        "max_tokens": args.max_tokens,
        "times_as_deep": args.times,
        "num_prompts": {},
        "versions": {},
        "rows": [],
    }
    if args.resume and args.out.exists():
        before = json.loads(args.out.read_text(encoding="utf-8"))
        if any(before[key] != record[key] for key in ("command", "runs", "max_tokens", "times_as_deep")):
            raise SystemExit(f"{args.out} was measured by {before['command']!r}: give the same options, or no --resume")
        record = before
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder), record)


if __name__ == "__main__":
    main()
