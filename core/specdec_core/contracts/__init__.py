"""The interfaces between plugins and the engine. Nothing here imports torch."""
