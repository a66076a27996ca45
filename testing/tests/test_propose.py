import numpy as np
import pytest
import torch
from attrs import frozen

from specdec_core import ConfigError, Draft, DraftTree, Plan, PluginError, Plugins, Proposer, ProposerSpec, Stream
from specdec_testing import SimpleRequest, drive, propose

CALLS = []


@frozen
class EchoConfig:
    echo_back: int = 1
    echo_sampled: bool = False


class Echo(Proposer):
    """A proposer that drafts copies of one token of the context, the token `echo_back` positions before the last. With
    the option `echo_sampled` it samples random tokens instead."""

    def __init__(self, config, context):
        self.config, self.context = config, context

    def start(self, request):
        CALLS.append(("start", request.id))

    def observe(self, observation):
        rows = zip(observation.offsets, observation.offsets[1:], strict=False)
        seen = [observation.token_ids[a:b].tolist() for a, b in rows]
        CALLS.append(("observe", seen, observation.positions.tolist(), observation.next_token_ids.tolist()))

    def propose(self, batch):
        CALLS.append(("propose", batch.root_token_ids.tolist(), batch.root_positions.tolist()))
        chains = []
        for i, (request, budget) in enumerate(zip(batch.requests, batch.max_draft_tokens, strict=True)):
            token = int(request.token_ids[max(len(request.token_ids) - 1 - self.config.echo_back, 0)])
            chains.append([token] * budget)
            if self.config.echo_sampled:
                nodes = torch.arange(budget)
                weights = torch.ones(budget, self.context.target.vocab_size)
                chains[-1] = batch.random.categorical(weights, Stream.DRAFT, torch.full((budget,), i), nodes).tolist()
        return Draft.from_chains(chains, self.context.device)

    def finish(self, request, reason):
        CALLS.append(("finish", request.id))


@pytest.fixture
def echo(monkeypatch):
    """Make `echo` the only installed method. The fixture's value is a function that sets the `Plan` of that method."""
    CALLS.clear()

    def install(plan):
        spec = ProposerSpec(
            "echo", EchoConfig, build=Echo, api=1, plan=lambda config, target, num_speculative_tokens: plan
        )

        class Installed:
            def proposer(self, name):
                if name != spec.name:
                    raise PluginError(f"unknown proposer {name!r}")
                return spec

        monkeypatch.setattr(drive.Plugins, "load", Installed)

    install(Plan())
    return install


def test_one_tree_per_context(echo):
    trees = propose("echo", [[5, 6, 7], [9]], num_speculative_tokens=3, echo_back=2)
    assert trees == [DraftTree([5, 5, 5], [-1, 0, 1]), DraftTree([9, 9, 9], [-1, 0, 1])]
    assert propose("echo", []) == []


def test_the_calls_of_a_request(echo):
    propose("echo", [[5, 6, 7], [9], np.array([1, 2])])
    assert CALLS == [
        ("start", "request-0"),
        ("start", "request-1"),
        ("start", "request-2"),
        ("observe", [[5, 6], [1]], [0, 1, 0], [7, 2]),
        ("propose", [7, 9, 2], [2, 0, 1]),
        ("finish", "request-0"),
        ("finish", "request-1"),
        ("finish", "request-2"),
    ]
    CALLS.clear()
    echo(Plan(observes=False))
    propose("echo", [[5, 6, 7]])
    assert [call[0] for call in CALLS] == ["start", "propose", "finish"]


def test_draws_follow_the_seed(echo):
    def drawn(seed):
        return propose("echo", [[1, 2], [1, 2]], seed=seed, temperature=1.0, echo_sampled=True)

    first, second = drawn(0)
    assert drawn(0) == [first, second]
    assert first != second
    assert drawn(1)[0] == second


def test_unknown_option_names_the_close_one(echo):
    with pytest.raises(
        ConfigError, match=r"method 'echo' has no key 'echo_bakc': did you mean 'echo_back'\?.*echo_sampled"
    ):
        propose("echo", [[1]], echo_bakc=2)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan(taps=("input.2", "final")), r"'echo' needs features of the target \(input.2, final\)"),
        (Plan(kv_layout=object()), "needs a KV group"),
        (Plan(scratch_slots=4), "needs 4 KV slots"),
    ],
)
def test_a_method_that_needs_a_target_is_refused(echo, plan, says):
    echo(plan)
    with pytest.raises(ConfigError, match=says):
        propose("echo", [[1, 2]])
    assert CALLS == []


def test_bad_arguments(echo):
    with pytest.raises(ConfigError, match=r"contexts\[1\] is empty"):
        propose("echo", [[1], []])
    with pytest.raises(ConfigError, match="num_speculative_tokens=0 must be >= 1"):
        propose("echo", [[1]], num_speculative_tokens=0)


def test_an_unknown_method_is_the_plugins_error():
    with pytest.raises(PluginError, match="'no_such_method'"):
        propose("no_such_method", [[1]])


def test_a_real_plugin():
    if "ngram" not in {plugin.name for plugin in Plugins.load().listing() if plugin.status == "ok"}:
        pytest.skip("specdec-proposer-ngram is not installed")
    assert propose("ngram", [[1, 2, 3, 1, 2]], num_speculative_tokens=2, prompt_lookup_max=2) == [
        DraftTree([3, 1], [-1, 0])
    ]
    with pytest.raises(ConfigError, match="prompt_lookup_max"):
        propose("ngram", [[1]], prompt_lookup_maxx=2)


def test_a_request_cannot_be_written_to():
    request = SimpleRequest("a", [1, 2, 3])
    assert (request.num_prompt_tokens, request.token_ids.dtype) == (2, np.int64)
    with pytest.raises(ValueError, match="read-only"):
        request.token_ids[0] = 5
