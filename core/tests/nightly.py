"""Whether this is the nightly run, `make test-all`: it adds the tests marked `nightly` and uses larger numbers."""

from __future__ import annotations

import os

IS_NIGHTLY = bool(os.environ.get("SPECDEC_NIGHTLY"))
