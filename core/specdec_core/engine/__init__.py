"""The engine: one loop for plain decoding, chains and trees. `engine.py` has the loop; `build.py` makes its parts."""
