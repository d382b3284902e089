# SPDX-License-Identifier: Apache-2.0
"""GRPO on short arithmetic questions: a CPU trainer, a live vLLM server, and deltas between them (`__main__`)."""

import examples.grpo  # noqa: F401 - says how torch's threads wait, before torch is loaded
