"""Applies sampling parameters to the logits of all requests and draft tokens; makes the engine's random numbers."""
