"""Applies sampling parameters to the logits of all requests and draft tokens; generates the engine's random numbers."""
