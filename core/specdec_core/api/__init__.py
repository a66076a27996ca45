"""The Python API: `LLM` and `AsyncLLM`, with their inputs and outputs."""
