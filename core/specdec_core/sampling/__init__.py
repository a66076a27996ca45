"""Logits processing for the rows of all roots and nodes, and the engine's random numbers."""
