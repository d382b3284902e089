# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md: one section a benchmark, each replaced by the run that measured it."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

__all__ = ["machine", "progress", "update_coefficients", "write_section"]

_REPORT = Path(__file__).parent.parent / "docs" / "performance.md"
_COEFFICIENTS = Path(__file__).parent.parent / "vllm_delta_snapshot" / "coefficients.json"
_HEAD = (
    "# Performance\n\nThe tables are written by `make bench`; do not edit them. Read the ratios: seconds are those of one small"
    " machine.\n"
)


def machine() -> str:
    """Say what the numbers were taken on."""
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{os.cpu_count()} cores ({platform.machine()}, {capability}), torch {torch.__version__} with"
        f" {torch.get_num_threads()} threads, numpy {np.__version__}"
    )


def progress(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr, flush=True)


def write_section(name: str, title: str, method: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Replace one section of the report, or add it."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    table = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    table += [f"| {' | '.join(map(str, row))} |" for row in rows]
    section = "\n".join([begin, f"## {title}", "", method, "", *table, end])
    text = _REPORT.read_text() if _REPORT.exists() else _HEAD
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    text = pattern.sub(lambda _: section, text) if pattern.search(text) else f"{text.rstrip()}\n\n{section}\n"
    _REPORT.write_text(text)


def update_coefficients(**fields: object) -> None:
    """Replace some of what the planner multiplies with, and leave what other benchmarks measured."""
    known = json.loads(_COEFFICIENTS.read_text())
    _COEFFICIENTS.write_text(json.dumps(known | fields, indent=1) + "\n")
