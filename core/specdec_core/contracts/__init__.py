"""What plugins, verifiers, KV managers and the engine agree on. Nothing here imports torch."""
