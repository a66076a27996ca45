"""What users call: `LLM`, `AsyncLLM`, and what they take and return."""
