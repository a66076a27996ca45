"""specdec's proposers inside vLLM: speculative_config={"method": "custom_class", "model": "specdec_vllm.Proposer"}."""

from specdec_vllm.proposer import Proposer

__all__ = ["Proposer"]
