"""The engine: one loop for plain decoding, chain drafts and tree drafts (`engine.py`). `build.py` makes its parts."""
