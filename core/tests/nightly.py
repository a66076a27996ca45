"""What is more in the nightly run, `make test-all`: tests with the marker `nightly`, and larger numbers."""

from __future__ import annotations

import os

IS_NIGHTLY = bool(os.environ.get("SPECDEC_NIGHTLY"))
