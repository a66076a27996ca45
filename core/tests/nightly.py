"""Whether the tests run as `make test-all`, which adds the tests marked `nightly` and runs others on more requests."""

from __future__ import annotations

import os

IS_NIGHTLY = bool(os.environ.get("SPECDEC_NIGHTLY"))
