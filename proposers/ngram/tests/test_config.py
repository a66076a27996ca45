import pytest

from specdec_core import ConfigError
from specdec_proposer_ngram import NgramConfig


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, (2, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 7}, (7, 7)),
        ({"prompt_lookup_min": None, "prompt_lookup_max": 2}, (2, 2)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_a_bound_left_out_mirrors_the_other(options, lengths):
    assert NgramConfig(**options).lengths == lengths


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_lookup_max": 0}, r"prompt_lookup_max=0 .* from 1 to"),
        ({"prompt_lookup_min": -2, "prompt_lookup_max": 4}, r"prompt_lookup_min=-2 .* from 1 to"),
        ({"prompt_lookup_min": 0, "prompt_lookup_max": 0}, r"prompt_lookup_min=0 .* from 1 to"),
        ({"prompt_lookup_max": "4"}, r"prompt_lookup_max='4' .* integer"),
        ({"prompt_lookup_max": 4.0}, r"prompt_lookup_max=4.0 .* integer"),
        ({"prompt_lookup_min": True}, r"prompt_lookup_min=True .* integer"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 3}, r"prompt_lookup_min=5 must be <= prompt_lookup_max=3"),
        ({"prompt_lookup_match": "longest"}, r"prompt_lookup_match='longest' .* 'first' .* 'last'"),
        ({"prompt_lookup_match": None}, r"prompt_lookup_match=None .* 'first' .* 'last'"),
    ],
)
def test_refused_with_the_value_and_what_is_allowed(options, says):
    with pytest.raises(ConfigError, match=says):
        NgramConfig(**options)
