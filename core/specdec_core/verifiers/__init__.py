"""Core's verifiers: which draft tokens are accepted, and the recovered or bonus token after them."""
