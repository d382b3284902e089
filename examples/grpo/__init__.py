# SPDX-License-Identifier: Apache-2.0
"""What the GRPO examples are made of: base checkpoint, policy, rollouts over HTTP, a vLLM server of one's own."""

import os
import signal

# Before torch is loaded: its threads sleep when they wait, so that trainer and server can share a few cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class ExampleError(Exception):
    """The example cannot go on; the message says why and what to do."""


def end_on_sigterm() -> None:
    """Have SIGTERM end the program as SIGINT does: servers that it started are stopped on the way out."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    del frame
    raise KeyboardInterrupt(signal.Signals(number).name)
