# SPDX-License-Identifier: Apache-2.0
"""GRPO on short arithmetic questions: a CPU trainer, a live vLLM server, and deltas between them (`__main__`)."""

import os

# Before torch is loaded: its threads sleep when they wait, so that trainer and server can share a few cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
