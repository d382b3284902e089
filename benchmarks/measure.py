# SPDX-License-Identifier: Apache-2.0
"""What benchmarks measure with: seconds, their spread, and the peak of the process's memory."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

__all__ = ["peak", "reset_peak", "spread", "timed"]


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes."""
    started = time.perf_counter()
    with torch.no_grad():
        work()
    return time.perf_counter() - started


def spread(seconds: Sequence[float]) -> list[float]:
    """Return median, smallest and largest."""
    return [round(f(seconds), 5) for f in (statistics.median, min, max)]


def reset_peak() -> int:
    """Have the kernel forget the process's peak of memory, and return what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """Return the most bytes that the process had since `reset_peak`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(match[1]) if match else 0
