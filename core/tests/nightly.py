"""Whether the tests run as `make test-all`. This adds the tests marked `nightly`, and more requests in other tests."""

from __future__ import annotations

import os

IS_NIGHTLY = bool(os.environ.get("SPECDEC_NIGHTLY"))
