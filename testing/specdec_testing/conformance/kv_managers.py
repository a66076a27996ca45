"""`KVManagerConformance`, the class that plugin authors subclass to test a KV manager."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from attrs import define

from specdec_core.api.llm import LLM
from specdec_core.config.sampling import SamplingParams
from specdec_core.contracts.draft import DraftTree
from specdec_core.contracts.kv import KVContext, KVManager, KVManagerSpec
from specdec_core.errors import CapacityError, PluginError
from specdec_core.plugins import Plugins
from specdec_testing.conformance.base import Conformance, NamedSubject
from specdec_testing.conformance.runs import make_llm, quietly
from specdec_testing.conformance.spec import check_imports
from specdec_testing.conformance.workload import PROMPTS
from specdec_testing.kv_driver import HEAD, LAZY, Driver, Part, path_to
from specdec_testing.tiny import tiny_target

IDS = ("a", "b", "c", "d")
GROUPS = ((), (HEAD,), (LAZY,), (HEAD, LAZY))
BLOCK_SIZES = (1, 2, 4)


@define(eq=False)
class CheckedKVManager:
    """Builds the KV manager that a conformance class checks."""

    subject: NamedSubject

    @cached_property
    def plugins(self) -> Plugins:
        modules = [*self.subject.modules, "specdec_testing.conformance.coins"]
        return quietly(lambda: Plugins.load(modules=modules))

    @cached_property
    def spec(self) -> KVManagerSpec:
        try:
            return self.plugins.kv_manager(self.subject.name)
        except PluginError as error:
            pytest.skip(f"it cannot be loaded: {error}")

    def build(self, num_blocks: int, block_size: int) -> KVManager:
        options = None if self.spec.config is None else self.spec.config(**self.subject.options)
        return self.spec.build(options, KVContext(num_blocks, block_size, torch.device("cpu")))

    def driver(self, num_blocks: int, block_size: int) -> Driver:
        return Driver(self.build(num_blocks, block_size), num_blocks, block_size)


def random_tree(rng: np.random.Generator) -> DraftTree:
    """Return a random draft tree: a chain half of the time, else with branches and dead nodes."""
    num_nodes, is_chain = int(rng.integers(0, 7)), rng.random() < 0.5
    parents = [i - 1 if is_chain else int(rng.integers(-2, i)) for i in range(num_nodes)]
    return DraftTree(rng.integers(1, 3, num_nodes).tolist(), parents)


def random_steps(driver: Driver, seed: int, number: int = 60, *, drafts: bool = True, salts: bool = True) -> None:
    """Admit, run, preempt and release random requests. Their prompts begin alike, so that prefixes repeat."""
    rng = np.random.default_rng(seed)
    for _ in range(number):
        kind, request_id = rng.choice(["admit", "run", "run", "run", "catch_up", "release"]), str(rng.choice(IDS))
        if kind == "admit" and request_id not in driver.requests:
            length = int(rng.integers(1, 14))
            tokens = ([1, 1, 2, 1] * 4)[:length] if rng.random() < 0.7 else rng.integers(1, 3, length).tolist()
            salt = "s" if salts and rng.random() < 0.2 else ""
            driver.admit(request_id, salt, tokens, GROUPS[int(rng.integers(len(GROUPS)))] if drafts else ())
        elif kind == "run" and driver.requests:
            parts = []
            for each in sorted(driver.requests):
                if rng.random() < 0.6:
                    tree = random_tree(rng) if drafts else DraftTree([], [])
                    path = path_to(tree, int(rng.integers(-1, len(tree.token_ids))))
                    known, stops = int(rng.integers(1, 9)), drafts and rng.random() < 0.1
                    parts.append(Part(each, known, tree, path, int(rng.integers(1, 3)), stops))
            for each in driver.run(parts):
                driver.release(each)  # it is preempted
        elif kind == "catch_up" and request_id in driver.requests:
            driver.catch_up(request_id, int(rng.integers(1, 20)))
        elif kind == "release":
            driver.release(request_id)  # unknown ids are ignored
        driver.check_all()


def release_all(driver: Driver) -> None:
    for request_id in list(driver.requests):
        driver.release(request_id)
    driver.manager.check_integrity()
    free = driver.manager.num_free_blocks
    assert free == driver.num_blocks, (
        f"after all requests are released, all {driver.num_blocks} blocks are free (cached ones count); {free} are: "
        f"release gives back every block, also those that only reserve or a draft used"
    )


class Rank:
    """A KV manager and another one, as on the second rank of tensor parallelism: it gets all calls but `metadata` and
    `num_free_blocks`, and must give the same answers."""

    def __init__(self, first: KVManager, second: KVManager) -> None:
        self._first, self._second = first, second

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._first, name)
        if name in ("metadata", "cache", "check_integrity") or not callable(own):
            return own

        def both(*given: Any) -> Any:
            answers = [_answer(getattr(each, name), given) for each in (self._first, self._second)]
            assert answers[0] == answers[1], (
                f"the same calls get the same answers on each rank; {name} gave {answers[0]} and {answers[1]}: decide "
                f"by the calls alone, not by a clock, by chance, or by calls of metadata and num_free_blocks"
            )
            if isinstance(answers[0], str):
                raise CapacityError(answers[0])
            return answers[0]

        return both


def _answer(call: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    try:
        return call(*given)
    except CapacityError:
        return "CapacityError"


class KVManagerConformance(Conformance, is_kit=True):
    """Tests that a KV manager keeps the contract in `specdec_core.contracts.kv`, with one test for each rule.

    kv_manager: its name, as users give it to `LLM`.
    options: its keys of kv_manager_config.
    modules: modules to load the plugin from, if it is not installed.
    skips: {name of a test: why it does not apply}. Defining a subclass that overrides a test raises PluginError.

    Most tests drive the manager without a model. In place of keys and values, each slot holds a hash of the tokens that
    they would depend on.
    """

    kv_manager: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def kv_manager_subject(cls, config: pytest.Config) -> NamedSubject:
        """Return the KV manager to check. config: pytest's configuration object."""
        return NamedSubject(cls.kv_manager, cls.modules, cls.options)

    def test_kv_manager_is_offered(self, specdec_kv_manager: CheckedKVManager) -> None:
        """The plugin can be imported, and its hook `specdec_kv_managers` returns a KVManagerSpec with this name,
        written for the installed plugin API."""
        try:
            specdec_kv_manager.plugins.kv_manager(specdec_kv_manager.subject.name)
        except PluginError as error:
            pytest.fail(f"a KV manager is offered by the hook specdec_kv_managers, under the users' name: {error}")

    def test_kv_manager_module_is_light(self, specdec_kv_manager: CheckedKVManager) -> None:
        """The plugin's module does not import torch or transformers: `KVManagerSpec.build` does that, since listing
        plugins imports the module of each."""
        check_imports(specdec_kv_manager.subject.modules, specdec_kv_manager.spec.name, "torch", "transformers")

    def test_caches(self, specdec_kv_manager: CheckedKVManager) -> None:
        """`cache` returns keys and values of one layer, with a row for each slot and one more, which padding writes to.
        Layers and groups share no memory."""
        driver = specdec_kv_manager.driver(4, 2)
        layers = ((0, 0), (0, 1), (1, 0), (HEAD, 0))
        caches = [cache for group, layer in layers for cache in driver.manager.cache(group, layer)]
        for number, cache in enumerate(caches):
            assert len(cache) == 4 * 2 + 1, f"a cache has num_slots + 1 rows, here 9; one has {len(cache)}"
            cache.fill_(number)
        assert [float(cache.mean()) for cache in caches] == [*range(8)], "layers' caches are separate; two share memory"

    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_slots_hold_their_tokens(self, specdec_kv_manager: CheckedKVManager, block_size: int) -> None:
        """Every slot of a request keeps what was written for it, whatever other requests do: prompts in chunks, several
        requests that begin alike, preemption. No block is shared with a request that writes to it."""
        for seed in range(6):
            random_steps(specdec_kv_manager.driver(24 // block_size, block_size), seed, drafts=False, salts=False)

    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_compact(self, specdec_kv_manager: CheckedKVManager, block_size: int) -> None:
        """`compact` moves the keys and values of accepted nodes to the slots after the known tokens, in groups with
        `keeps_nodes`, also where they overlap with the slots of other accepted nodes."""
        for seed in range(20):
            rng, driver = np.random.default_rng(seed), specdec_kv_manager.driver(64 // block_size, block_size)
            for i, name in enumerate(IDS):
                driver.admit(name, str(i), rng.integers(1, 9, 3).tolist(), (LAZY,))
            for _ in range(3):
                trees = [random_tree(rng) for _ in IDS]
                paths = [path_to(tree, int(rng.integers(-1, len(tree.token_ids)))) for tree in trees]
                driver.run([Part(*each, bonus=3) for each in zip(IDS, [9] * 4, trees, paths, strict=True)])

    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_release_gives_all_back(self, specdec_kv_manager: CheckedKVManager, block_size: int) -> None:
        """`release` frees all of a request's blocks, at any moment, and ignores unknown ids. `advance` frees the blocks
        of rejected nodes."""
        for seed in range(4):
            driver = specdec_kv_manager.driver(24 // block_size, block_size)
            random_steps(driver, seed, 30)
            release_all(driver)
            driver.release("never seen")
            driver.admit("big", "", [1] * 24)
            release_all(driver)

    def test_capacity(self, specdec_kv_manager: CheckedKVManager) -> None:
        """`reserve` raises CapacityError if too few blocks are free, and changes nothing. `metadata` raises it for
        slots that a request does not hold. Both leave the manager usable."""
        driver = specdec_kv_manager.driver(4, 2)
        assert driver.admit("a", "", [1, 2, 3, 4], (HEAD,)), "5 slots fit into 4 blocks of 2"
        assert not driver.admit("b", "", [5, 6, 7, 8]), "5 more slots do not"
        driver.step("a", 4)
        assert driver.run([Part("a", 1, DraftTree([1] * 9, [-1] * 9))]) == ["a"], "10 more slots do not"
        driver.check_all()
        with pytest.raises(CapacityError):
            driver.manager.metadata(["a"], [0], [9])
        assert driver.step("a", 1), "the request goes on with fewer slots"
        release_all(driver)

    def test_admit(self, specdec_kv_manager: CheckedKVManager) -> None:
        """`admit` finds whole blocks and never all tokens, since the last one is computed for its logits. It finds
        nothing if it gets no tokens: all of them must then be computed."""
        driver = specdec_kv_manager.driver(16, 2)
        for length in (1, 2, 3, 4, 4, 5):
            driver.admit("a", "", [1, 2, 1, 2, 1][:length])
            driver.step("a", length)
            driver.release("a")
        found = driver.manager.admit("b", np.empty(0, dtype=np.int64), "", ())
        assert found == 0, f"nothing is found for a request without tokens; admit found {found}"
        driver.manager.release("b")
        release_all(driver)

    def test_salts_separate(self, specdec_kv_manager: CheckedKVManager) -> None:
        """A request finds nothing of requests with another salt."""
        driver, tokens = specdec_kv_manager.driver(32, 2), [1, 2, 3, 4, 5, 6, 7]
        for salt in ("one", "", "two"):
            before = driver.num_hits
            driver.admit("a", salt, tokens, (HEAD,))
            assert driver.num_hits == before, (
                f"requests share blocks with requests of the same salt only; one with salt {salt!r} found "
                f"{driver.num_hits - before} tokens of another: the key of a block covers the salt"
            )
            driver.step("a", len(tokens))
            driver.release("a")

    def test_tokens_after_a_stop(self, specdec_kv_manager: CheckedKVManager) -> None:
        """Draft tokens that were accepted after a stop are no part of the request: their slots are shared with none."""
        driver = specdec_kv_manager.driver(8, 2)
        driver.admit("a", "", [1, 1, 1])
        driver.step("a", 3, [2, 2, 2], 2, stops=True)
        for last in (1, 2):
            driver.admit("b", "", [1, 1, 1, last, last, last])
            found = driver.requests["b"].num_cached
            assert found <= 2, (
                f"`advance` may share only slots of tokens in token_ids; of 3 tokens and 3 that were accepted after a "
                f"stop, {found} were found"
            )
            driver.release("b")

    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_draft_groups(self, specdec_kv_manager: CheckedKVManager, block_size: int) -> None:
        """What `admit` finds is valid in all groups that the request uses: a draft's group holds what `fill` declared,
        and a slot's key covers the next `lookahead` tokens."""
        driver = specdec_kv_manager.driver(28 // block_size, block_size)
        driver.admit("a", "", [1] * block_size, (HEAD,))
        driver.step("a", block_size, bonus=2)
        driver.release("a")
        driver.admit("b", "", [1] * (block_size + 2), (HEAD,))  # another token follows the block
        for seed in range(8):
            random_steps(specdec_kv_manager.driver(28 // block_size, block_size), seed, 80)

    def test_same_calls_same_answers(self, specdec_kv_manager: CheckedKVManager) -> None:
        """Two managers that get the same calls, but for `metadata` and `num_free_blocks`, give the same answers, as the
        ranks of tensor parallelism need."""
        for seed in range(4):
            ranks: Any = Rank(specdec_kv_manager.build(12, 2), specdec_kv_manager.build(12, 2))
            random_steps(Driver(ranks, 12, 2), seed)

    def test_interrupts(self, specdec_kv_manager: CheckedKVManager) -> None:
        """Ctrl-C may break off any call. After the engine has released every request, perhaps twice, all blocks are
        free, and the manager works."""
        number = 1
        while True:
            driver = specdec_kv_manager.driver(12, 2)
            with interrupted(driver.manager, number) as is_over:
                random_steps(driver, 3, 12)
            if is_over():
                break
            for request_id in (*IDS, *IDS):
                driver.release(request_id)
            release_all(driver)
            driver.admit("new", "", [4, 5, 6])
            driver.step("new", 3)
            release_all(driver)
            number += 1 + number // 12
        assert number > 1, "the kit's own fault: nothing was interrupted"

    def test_in_the_engine(self, specdec_kv_manager: CheckedKVManager, tmp_path: Path) -> None:
        """In an engine, outputs are those of the KV manager `paged`, with and without drafts, also where requests are
        preempted and where prompts were seen before."""
        folder, checked = tiny_target(tmp_path), specdec_kv_manager
        params = SamplingParams(temperature=0, max_tokens=8)
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in (*PROMPTS, PROMPTS[1])]

        def run(llm: LLM) -> list[list[int]]:
            return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

        expected = run(make_llm(folder, checked.plugins, None, kv_manager="paged"))
        own = {"kv_manager": checked.spec.name, "kv_manager_config": dict(checked.subject.options)}
        for speculative in (None, {"method": "coins", "num_speculative_tokens": 3}):
            llm = make_llm(folder, checked.plugins, speculative, **own, num_kv_blocks=24, max_model_len=64)
            for turn in ("first", "second"):
                assert run(llm) == expected, f"outputs do not depend on the KV manager; in the {turn} run they do"
            llm.engine.kv.check_integrity()


@contextmanager
def interrupted(manager: KVManager, number: int) -> Iterator[Callable[[], bool]]:
    """Raise KeyboardInterrupt at the number-th line that runs in the code of a manager's class, its bases or its block
    pool, and catch it. Gives a function that returns whether the block ended before that line."""
    files = {sys.modules[base.__module__].__file__ for base in type(manager).__mro__ if base is not object}
    folders = {Path(file).parent for file in files if file and base_is_ours(file)}
    num_left, before = number, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_left
        if frame.f_code.co_filename not in files and Path(frame.f_code.co_filename).parent not in folders:
            return None
        if event == "line":
            num_left -= 1
            if num_left == 0:
                sys.settrace(before)
                raise KeyboardInterrupt
        return trace

    try:
        sys.settrace(trace)
        yield lambda: num_left > 0
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def base_is_ours(file: str) -> bool:
    """Whether a file is part of a package, whose other modules a manager may use, too."""
    return (Path(file).parent / "__init__.py").exists()
