"""Which engines of tests are compiled, as vLLM does by default: those that ask for it, or all (make test-compiled)."""

from __future__ import annotations

import os
import shutil

ALL_COMPILED = bool(os.environ.get("DELTA_SNAPSHOT_TEST_COMPILED"))
"""Also those that do not ask for it."""

CAN_COMPILE = shutil.which(os.environ.get("CXX", "g++")) is not None
"""Whether there is the C++ compiler that torch asks for; vLLM's CPU backend does not start without it, unless eager."""
