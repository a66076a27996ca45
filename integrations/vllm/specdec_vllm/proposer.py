"""The class that vLLM loads, and all that this package knows of vLLM (0.32, model runner V1).

vLLM calls `propose` after each step, once the step's tokens are written into the rows of its persistent batch. What a
row holds:

- A request stays in its row while it runs, but vLLM fills gaps with later rows (condense) and swaps rows. A request
  that is preempted, or not scheduled in a step, leaves its row and gets another one later, with the same tokens.
- `num_tokens_no_spec[i]` counts the prompt and the output with the tokens just sampled. What follows in the row, such
  as rejected draft tokens, means nothing.
- `sampled_token_ids[i]` are the tokens just sampled: accepted draft tokens and one more. It is empty while the prompt
  is computed, also if it is computed again after a preemption.
- In a step in which a request is within num_speculative_tokens of max_model_len, vLLM does not call `propose`, for no
  request.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import finalize

import numpy as np
import torch

from specdec_core import ConfigError, Plugins, SpeculativeConfig, TargetInfo, TokenDrafter
from specdec_vllm.rows import Rows

METHOD, OPTIONS = "SPECDEC_VLLM_PROPOSER", "SPECDEC_VLLM_CONFIG"
"""Environment variables: the proposer's name, and its own options as a JSON object."""


class Proposer:
    """Drafts with an installed specdec proposer that needs token ids only. Trees are cut to their likeliest path.

    vllm_config: vLLM's VllmConfig.

    Raises ConfigError or PluginError if an environment variable or an option is wrong, if the proposer is not installed
    or if it needs more than token ids. vLLM makes a RuntimeError with the same message of it.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._number = _num_speculative_tokens(vllm_config.speculative_config)
        self._max_model_len: int = vllm_config.model_config.max_model_len
        num_rows, plugins = vllm_config.scheduler_config.max_num_seqs, Plugins.load()
        config = _options() | {"method": _method(plugins), "num_speculative_tokens": self._number}
        self._rows = Rows(num_rows)
        self._drafter = TokenDrafter(
            config, _target(vllm_config.model_config), max_num_seqs=self._rows.most_requests, plugins=plugins
        )
        if self._drafter.plan.reads_prediction:
            raise ConfigError(
                f"{METHOD}={config['method']!r} drafts from the `prediction` of a request, and vLLM's requests have "
                f"none: it would draft nothing"
            )
        self.close = finalize(self, _close, self._rows, self._drafter)  # vLLM never closes it: also runs at exit

    def load_model(self, *args: object, **keywords: object) -> None:
        """Do nothing: vLLM calls this with the target model, and there is no draft model to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return a chain of draft tokens for each row, possibly empty.

        sampled_token_ids: [batch], the tokens just sampled.
        num_tokens_no_spec: int32 [max_num_seqs], the tokens of each row, those just sampled included.
        token_ids_cpu: int32 [max_num_seqs, max_model_len].
        slot_mappings: not used.
        """
        lengths = num_tokens_no_spec[: len(sampled_token_ids)].tolist()
        texts = [token_ids_cpu[row, :length] for row, length in enumerate(lengths)]
        requests = self._rows.read(texts, [len(new) for new in sampled_token_ids], self._drafter)
        # The next step may verify as many tokens again as are drafted now, and is then near the limit.
        self._rows.may_miss_a_step = max(lengths, default=0) + 2 * self._number > self._max_model_len
        drafting = {row: request for row, request in enumerate(requests) if request is not None}
        limits = [max(0, min(self._number, self._max_model_len - 1 - lengths[row])) for row in drafting]
        chains = dict(zip(drafting, self._drafter.propose_chains([*drafting.values()], limits), strict=True))
        return [chains.get(row, []) for row in range(len(lengths))]


def _close(rows: Rows, drafter: TokenDrafter) -> None:
    rows.clear(drafter)
    drafter.close()


def _method(plugins: Plugins) -> str:
    if name := os.environ.get(METHOD, ""):
        return name
    raise ConfigError(f"{METHOD} is not set: name an installed proposer, of {', '.join(plugins.proposers())}")


def _options() -> dict[str, Any]:
    text = os.environ.get(OPTIONS) or "{}"
    example = 'such as {"prompt_lookup_max": 4}'
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{OPTIONS}={text} is not JSON ({error}): give an object, {example}") from error
    if not isinstance(options, Mapping):
        raise ConfigError(f"{OPTIONS}={text} is not a JSON object: give one, {example}")
    if foreign := sorted(SpeculativeConfig.core_keys() & options.keys()):
        raise ConfigError(
            f"{OPTIONS} has the key {foreign[0]!r}: it takes the proposer's own options. The name stands in {METHOD}, "
            f"num_speculative_tokens in vLLM's speculative_config, and the rest is for specdec's own engine"
        )
    return dict(options)


def _num_speculative_tokens(config: Any) -> int:
    number = getattr(config, "num_speculative_tokens", None)
    if not number:
        raise ConfigError(
            "vLLM's speculative_config has no num_speculative_tokens: give the most draft tokens of a step, such as 8"
        )
    if getattr(config, "num_speculative_tokens_per_batch_size", None) is not None:
        raise ConfigError(
            "num_speculative_tokens_per_batch_size has no effect on a custom_class, which vLLM does not tell the "
            "number of a step: leave it out"
        )
    return int(number)


def _target(model_config: Any) -> TargetInfo:
    model = model_config.hf_text_config
    return TargetInfo(
        model=model_config.model,
        model_type=model.model_type,
        vocab_size=model_config.get_vocab_size(),
        hidden_size=model_config.get_hidden_size(),
        num_layers=model.num_hidden_layers,
        max_model_len=model_config.max_model_len,
        dtype=model_config.dtype,
        device=torch.device("cpu"),  # vLLM takes lists of token ids, wherever the target runs
    )
