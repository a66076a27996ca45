"""Logits processing for every node of a tree, and the engine's source of noise."""
