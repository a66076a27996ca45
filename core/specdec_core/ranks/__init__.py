"""Several processes, one for each rank, that share the layers of a model (tensor parallelism).

Rank 0 is the engine's process. It decides everything: it schedules, drafts, samples and verifies. The other ranks hold
their part of the weights and of the KV cache, and repeat the commands that rank 0 sends them: calls of the KV manager
and forward passes.
"""
