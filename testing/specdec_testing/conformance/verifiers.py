"""`VerifierConformance`, the class that plugin authors subclass to test a verifier."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from attrs import define

from specdec_core.config.sampling import SamplingParams
from specdec_core.contracts.draft import Draft
from specdec_core.contracts.verifier import RandomSource, Verdict, Verifier, VerifierSpec
from specdec_core.engine.verification import build_verifier
from specdec_core.errors import PluginError
from specdec_core.ops import REFERENCE
from specdec_core.plugins import Plugins
from specdec_testing.conformance import shapes
from specdec_testing.conformance.base import Conformance, NamedSubject
from specdec_testing.conformance.runs import make_llm, quietly
from specdec_testing.conformance.spec import check_imports
from specdec_testing.conformance.verdicts import faults_of
from specdec_testing.conformance.workload import PROMPTS
from specdec_testing.drawn_batches import joint_error, noise, part, random_batch
from specdec_testing.drawn_trees import Model, Shape, draw, emit, outcomes
from specdec_testing.tiny import tiny_target

EXACT = 1e-12
"""The largest difference of a probability that is rounding, in float64."""


@define(eq=False)
class CheckedVerifier:
    """The verifier that a conformance class checks, built once."""

    subject: NamedSubject

    @cached_property
    def plugins(self) -> Plugins:
        return quietly(lambda: Plugins.load(modules=self.subject.modules))

    @cached_property
    def spec(self) -> VerifierSpec:
        try:
            return self.plugins.verifier(self.subject.name)
        except PluginError as error:
            pytest.skip(f"it cannot be loaded: {error}")

    @cached_property
    def verifier(self) -> Verifier:
        options = None if self.spec.config is None else self.spec.config(**self.subject.options)
        return build_verifier(self.spec, options, REFERENCE)

    def verify(self, logits: torch.Tensor, draft: Draft, random: RandomSource) -> Verdict:
        return self.verifier.verify(logits, draft, random)

    def takes(self, *given: Shape) -> bool:
        return not self.spec.chains_only or all(shape.is_chain for shape in given)

    def models(self, vocab: int, seed: int, shape: Shape) -> tuple[Model, Model]:
        """Return a random target and draft model. The target of a verifier for temperature 0 is certain of its
        tokens."""
        target, q = shapes.models(vocab, seed, shape)
        return self.certain(target), q

    def certain(self, target: Model) -> Model:
        if not self.spec.greedy_only:
            return target
        return {history: np.eye(len(probs))[probs.argmax()] for history, probs in target.items()}

    def batch(self, seed: int, vocab: int = 5) -> tuple[torch.Tensor, Draft]:
        """Return random logits and a batch of drafts of all shapes that the verifier takes."""
        known = shapes.CHAINS | shapes.TREES | shapes.DEAD_CHAINS | shapes.DEAD_TREES
        return random_batch([shape for shape in known.values() if self.takes(shape)], vocab, seed)


def skip_unless_lossless(checked: CheckedVerifier) -> None:
    if not checked.spec.lossless:
        pytest.skip("its VerifierSpec says lossless=False")


def skip_unless_taken(checked: CheckedVerifier, *given: Shape) -> None:
    if not checked.takes(*given):
        pytest.skip("its VerifierSpec says chains_only")


def same(one: Verdict, other: Verdict) -> bool:
    pairs = ((one.token_ids, other.token_ids), (one.rows, other.rows), (one.num_accepted, other.num_accepted))
    return all(torch.equal(*pair) for pair in pairs)


class OtherDraws:
    """A random source whose draws depend on the seed, but for the target's own."""

    def __init__(self, seed: int) -> None:
        self.target_token = noise(0, 1).target_token
        self.categorical, self.bernoulli = noise(seed, 1).categorical, noise(seed, 1).bernoulli


class VerifierConformance(Conformance, is_kit=True):
    """Tests that a verifier keeps the contract in `specdec_core.contracts.verifier`, with one test for each rule.

    verifier: its name, as in speculative_config.
    options: its own keys of speculative_config.
    modules: modules to load the plugin from, if it is not installed.
    skips: {name of a test: why it does not apply}. Defining a subclass that overrides a test raises PluginError.

    A verifier whose spec says that it is lossless is proved so: every outcome of its random draws is enumerated, in
    float64, on chains and trees with sampled, chosen and dead nodes.
    """

    verifier: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def verifier_subject(cls, config: pytest.Config) -> NamedSubject:
        """Return the verifier to check. config: pytest's configuration object."""
        return NamedSubject(cls.verifier, cls.modules, cls.options)

    def test_verifier_is_offered(self, specdec_verifier: CheckedVerifier) -> None:
        """The plugin can be imported, its hook `specdec_verifiers` returns a VerifierSpec with this name, written for
        the installed plugin API, and it can be built from its options."""
        try:
            specdec_verifier.plugins.verifier(specdec_verifier.subject.name)
        except PluginError as error:
            pytest.fail(f"a verifier is offered by the hook specdec_verifiers, under the name that users give: {error}")
        assert callable(getattr(specdec_verifier.verifier, "verify", None)), (
            f"VerifierSpec.build returns an object with the method verify; it returned {specdec_verifier.verifier!r}"
        )

    def test_verifier_module_is_light(self, specdec_verifier: CheckedVerifier) -> None:
        """The plugin's module does not import torch or transformers: `VerifierSpec.build` does that, since listing
        plugins imports the module of each."""
        check_imports(specdec_verifier.subject.modules, specdec_verifier.spec.name, "torch", "transformers")

    def test_verdict(self, specdec_verifier: CheckedVerifier) -> None:
        """The verdict's tensors have the right dtypes and shapes. The accepted tokens are a path of live nodes down the
        request's tree, `rows` are the rows of logits that decided them, and no emitted token has the logit -inf."""
        for seed in range(12):
            logits, draft = specdec_verifier.batch(seed)
            for fault in faults_of(
                specdec_verifier.verify(logits, draft, noise(seed, draft.batch_size)), logits, draft
            ):
                pytest.fail(fault)

    def test_verdict_without_draft(self, specdec_verifier: CheckedVerifier) -> None:
        """A batch without draft tokens gets one token per request."""
        draft, logits = Draft.from_chains([[], []]), torch.randn(2, 7, generator=torch.Generator().manual_seed(0))
        for fault in faults_of(specdec_verifier.verify(logits, draft, noise(0, 2)), logits, draft):
            pytest.fail(f"without any draft token, {fault}")

    def test_verify_changes_no_argument(self, specdec_verifier: CheckedVerifier) -> None:
        """`verify` does not write to the logits or to the draft's tensors, which others read after it."""
        logits, draft = specdec_verifier.batch(0)
        assert draft.q is not None
        given = {"logits": logits, "token_ids": draft.token_ids, "parents": draft.parents, "q": draft.q}
        before = {name: tensor.clone() for name, tensor in given.items()}
        specdec_verifier.verify(logits, draft, noise(0, draft.batch_size))
        changed = [name for name, tensor in before.items() if not torch.equal(tensor, given[name])]
        assert not changed, (
            f"verify leaves its arguments as they are; it wrote to {', '.join(changed)}: copy them first"
        )

    def test_same_draws_same_verdict(self, specdec_verifier: CheckedVerifier) -> None:
        """The same logits, draft and random source give the same verdict. All random numbers come from the source that
        `verify` is given: else seeds would not reproduce an output, and its distribution could not be enumerated."""
        for seed in range(4):
            logits, draft = specdec_verifier.batch(seed)
            one, other = (specdec_verifier.verify(logits, draft, noise(seed, draft.batch_size)) for _ in range(2))
            assert same(one, other), (
                f"equal arguments give equal verdicts; two calls gave {one.token_ids.tolist()} and "
                f"{other.token_ids.tolist()}: draw with `random` only, and keep no state between calls"
            )

    def test_alone_as_in_a_batch(self, specdec_verifier: CheckedVerifier) -> None:
        """A request gets the same tokens whether it is verified alone or in a batch, since its draws are the same."""
        for seed in range(4):
            logits, draft = specdec_verifier.batch(seed)
            together = specdec_verifier.verify(logits, draft, noise(0, draft.batch_size))
            for b in range(draft.batch_size):
                alone = specdec_verifier.verify(*part(logits, draft, b), noise(b, 1))
                assert torch.equal(together.token_ids[b], alone.token_ids[0]), (
                    f"a request's verdict depends on its own rows and draws; request {b} of {draft.batch_size} got "
                    f"{together.token_ids[b].tolist()}, and alone {alone.token_ids[0].tolist()}: key draws by the "
                    f"request and a number of the node within its tree, and read no other request's rows"
                )

    def test_not_finite_logits(self, specdec_verifier: CheckedVerifier) -> None:
        """A request whose root has NaN or +inf fails, with nothing but -1, and other requests are not affected."""
        logits, draft = specdec_verifier.batch(0)
        expected = specdec_verifier.verify(logits, draft, noise(0, draft.batch_size))
        others = torch.arange(draft.batch_size) != 1
        for value in (torch.nan, torch.inf):
            poisoned = logits.clone()
            poisoned[draft.offsets[1] + 1] = value
            found = specdec_verifier.verify(poisoned, draft, noise(0, draft.batch_size))
            assert set(found.token_ids[1].tolist()) == {-1}, (
                f"a request whose path reaches a row with {value} fails: token_ids -1 throughout; it got "
                f"{found.token_ids[1].tolist()}: specdec_core.trace does that from is_nan, and follow for tokens of -1"
            )
            assert torch.equal(found.token_ids[others], expected.token_ids[others]), (
                f"a request with {value} changes no other request's verdict; it did: sum and sort within a request"
            )

    def test_no_draw_decides_failure(self, specdec_verifier: CheckedVerifier) -> None:
        """Whether a request fails depends on no draw but the target's own. A failed request starts over without a
        draft: if it failed only when a draft token was accepted, its output would be biased."""
        skip_unless_lossless(specdec_verifier)
        for row, is_possible in product((1, 2, 3), (True, False)):
            logits, draft = random_batch([shapes.CHAINS["chain"]], 5, 0)
            logits[row] = torch.nan
            logits[row - 1, draft.token_ids[row - 1]] = 0 if is_possible else -torch.inf
            verdicts = [specdec_verifier.verify(logits, draft, OtherDraws(seed)) for seed in range(30)]
            failed = {int(verdict.token_ids[0, 0]) < 0 for verdict in verdicts}
            assert len(failed) == 1, (
                "no draw of acceptance decides whether a request fails; where a draft token's row is NaN, it fails for "
                "some seeds only: fail whenever the path could have reached that row, as specdec_core.trace does from "
                "is_possible and is_nan"
            )
            reached = [verdict for verdict in verdicts if row in verdict.rows and int(verdict.token_ids[0, 0]) >= 0]
            assert not reached, "a request whose path reaches a row with NaN fails; it did not: see specdec_core.trace"
            assert is_possible or failed == {False}, (
                "a request does not fail for a row behind a token that the target gives probability 0; it did: give "
                "specdec_core.trace the draft tokens that are possible"
            )

    @pytest.mark.parametrize("shape", shapes.SHAPES.values(), ids=shapes.SHAPES)
    def test_output_has_the_targets_distribution(self, specdec_verifier: CheckedVerifier, shape: Shape) -> None:
        """Every sequence of tokens has exactly the probability that the target gives it, over all draws of drafting and
        verification (1e-12, in float64). Only for verifiers that say that they are lossless."""
        skip_unless_lossless(specdec_verifier)
        skip_unless_taken(specdec_verifier, shape)
        sparse = shape in shapes.SPARSE.values()
        for vocab, seed in ((4, 0),) if sparse else ((2, 0), (3, 2)):
            if sparse:
                target, q = shapes.sparse_models(seed)
                target = specdec_verifier.certain(target)
            else:
                target, q = specdec_verifier.models(vocab, seed, shape)
            found = emit(specdec_verifier.verifier, target, q, shape, shapes.draw_sparse if sparse else draw)
            assert found.error < EXACT, (
                f"lossless: each output has the target's probability; {found.worst} has {found.actual:.6f} in place of "
                f"{found.expected:.6f}. Likely causes: a probability of another row, a residual that is not normalized "
                f"or leaves out earlier siblings, two draws with the same key, dead nodes that count, or an accepted "
                f"chosen node (q_rows -1) that the target's own draw did not confirm. Or give lossless=False"
            )

    @pytest.mark.parametrize("pair", shapes.PAIRS.values(), ids=shapes.PAIRS)
    def test_joint_distribution(self, specdec_verifier: CheckedVerifier, pair: tuple[Shape, Shape]) -> None:
        """The outputs of two requests of a batch are independent, each with its target's distribution."""
        skip_unless_lossless(specdec_verifier)
        skip_unless_taken(specdec_verifier, *pair)
        both = [specdec_verifier.models(2, seed, shape) for seed, shape in enumerate(pair)]
        error = joint_error(specdec_verifier.verifier, both, pair)
        assert error < EXACT, (
            f"two requests' outputs are independent; a pair of outputs is off by a probability of {error:.1e}: are "
            f"draws keyed by the request, and rows and lengths those of each request's live nodes?"
        )

    @pytest.mark.parametrize("name", [*shapes.DEAD_CHAINS, *shapes.DEAD_TREES])
    def test_dead_nodes_do_not_count(self, specdec_verifier: CheckedVerifier, name: str) -> None:
        """Dead (padding) nodes and the nodes below them change the probability of no output, for lossy verifiers,
        too."""
        shape = shapes.SHAPES[name]
        skip_unless_taken(specdec_verifier, shape)
        target, q = specdec_verifier.models(2, 0, shape)
        with_dead, without = (
            outcomes(specdec_verifier.verifier, target, q, each) for each in (shape, shapes.without_dead(shape))
        )
        for tokens in with_dead.keys() | without.keys():
            pair = with_dead.get(tokens, 0.0), without.get(tokens, 0.0)
            assert abs(pair[0] - pair[1]) < EXACT, (
                f"dead nodes change nothing; the tokens {tokens} have probability {pair[0]:.6f} with them and "
                f"{pair[1]:.6f} without: go by draft.num_live_per_request and draft.layout.is_alive"
            )

    def test_in_the_engine(self, specdec_verifier: CheckedVerifier, tmp_path: Path) -> None:
        """The verifier runs in an engine, with sampled chains of draft tokens. Greedy outputs are those of plain
        decoding, sampled ones are complete, and `RequestOutput.lossless` is what the VerifierSpec says."""
        folder, subject = tiny_target(tmp_path), specdec_verifier.subject
        plugins = quietly(lambda: Plugins.load(modules=[*subject.modules, "specdec_testing.conformance.coins"]))
        spec = specdec_verifier.spec
        config = {"method": "coins", "num_speculative_tokens": 3, "verifier": spec.name, **subject.options}
        plain, llm = make_llm(folder, plugins, None), make_llm(folder, plugins, config)
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
        greedy = SamplingParams(temperature=0, max_tokens=8)
        both = [each.generate(prompts, greedy, use_tqdm=False) for each in (plain, llm)]
        for expected, found in zip(*both, strict=True):
            assert found.outputs[0].token_ids == expected.outputs[0].token_ids, (
                f"at temperature 0 the output is that of plain decoding; after {found.prompt_token_ids} it is another"
            )
        if spec.greedy_only:
            return
        sampled = SamplingParams(temperature=0.8, max_tokens=8, seed=1, ignore_eos=True)
        for found in llm.generate(prompts, sampled, use_tqdm=False):
            assert len(found.outputs[0].token_ids) == 8, "each request gets all of its tokens"
            assert found.lossless == spec.lossless, f"an output says lossless={found.lossless}, the spec another thing"
