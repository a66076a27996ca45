from functools import partial

import pytest
import torch

from specdec_core import ConfigError
from specdec_core.config.speculative import SpeculativeConfig
from specdec_proposer_suffix import SuffixConfig, specdec_proposers


def test_the_defaults_are_vllms():
    config = SuffixConfig()
    assert (config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_cached_requests) == (24, 10000)
    assert (config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob) == (1.0, 0.1)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("max_tree_depth", 0, r"max_tree_depth=0 .* from 1 to"),
        ("max_tree_depth", 2**16 + 1, r"too large: give an integer from 1 to 65536"),
        ("max_tree_depth", 4.0, "not an integer"),
        ("max_cached_requests", -1, r"max_cached_requests=-1 .* from 0 to"),
        ("max_memory_mb", 0, r"max_memory_mb=0 .* from 1 to .* or None"),
        ("eviction", "random", r"eviction='random' .* 'fifo' or 'lru'"),
        ("max_spec_factor", -0.5, r"max_spec_factor=-0.5 .* \[0"),
        ("max_spec_factor", float("nan"), "max_spec_factor=nan"),
        ("max_spec_offset", -1, r"max_spec_offset=-1 .* \[0"),
        ("min_token_prob", 1.1, r"min_token_prob=1.1 .* \[0, 1\]"),
        ("min_token_prob", True, "truth value"),
        ("use_tree", 1, "use_tree=1 must be True or False"),
        ("cache_path", 3, "cache_path=3"),
        ("cache_path", "", "cache_path=''"),
        ("cache_path", "a\0b", "is not a file path"),
        ("cache_path", "~nosuchuser/c", "is not a file path"),
        ("cache_path", "x" * 300, "is not a file path"),
        ("cache_path", f"{__file__}/cache", "is not a file path"),
    ],
)
def test_refused_with_the_value_and_what_is_allowed(name, value, says):
    with pytest.raises(ConfigError, match=says):
        SuffixConfig(**{f"suffix_decoding_{name}": value})


@pytest.mark.parametrize(("name", "value"), [("cache_path", "x"), ("eviction", "lru"), ("max_memory_mb", 5)])
def test_options_of_a_cache_that_is_off_are_refused(name, value):
    says = f"max_cached_requests=0 keeps no outputs, so suffix_decoding_{name} has no effect: leave either out"
    with pytest.raises(ConfigError, match=says):
        SuffixConfig(suffix_decoding_max_cached_requests=0, **{f"suffix_decoding_{name}": value})


@pytest.mark.parametrize(("given", "number"), [({}, 24), ({"suffix_decoding_max_tree_depth": 9}, 9)])
def test_the_number_of_tokens_is_the_depth_unless_it_is_given(given, number):
    (spec,) = specdec_proposers()

    def number_of(**keys):
        mapping = {"method": "suffix", **keys}
        default = partial(spec.num_speculative_tokens, device=torch.device("cpu"))
        config = SpeculativeConfig.from_mapping(mapping, SuffixConfig, default_num_speculative_tokens=default)
        return config.num_speculative_tokens

    assert number_of(**given) == number
    assert number_of(**given, num_speculative_tokens=5) == 5
    assert number_of(**given, num_speculative_tokens=None) == number
