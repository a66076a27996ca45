import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside this file, however pytest imports it
