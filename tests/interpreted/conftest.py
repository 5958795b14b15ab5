"""Collects this folder only where Triton interprets: the variable is read when triton is imported, so these tests need
a process of their own. `make test` starts it beside the others."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
