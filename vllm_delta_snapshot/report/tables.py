# SPDX-License-Identifier: Apache-2.0
"""The numbers behind the pictures, as CSV: one row a version, and one row a version and layer.

Nothing is binned here. Text that a spreadsheet would take for a formula begins with an apostrophe.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from vllm_delta_snapshot.report.history import RunHistory
from vllm_delta_snapshot.report.text import printable
from vllm_delta_snapshot.report.touched import TouchedWeights

__all__ = ["csv_bytes", "layer_rows", "touched_rows", "version_rows"]

Cell = str | int | float | None

_FIELDS: Final = (
    "version", "base_version", "kind", "step", "changed_elements", "total_elements", "density", "changed_tensors",
    "payload_bytes", "checkpoint_bytes", "diff_s", "upload_s", "stage_s", "pause_s", "created_at",
)  # fmt: skip
_FORMULA: Final = ("=", "+", "-", "@")


def version_rows(history: RunHistory) -> Iterator[Sequence[Cell]]:
    """Yield the head, and a row for every version: what is recorded, and the metrics (``metric NAME``) behind it."""
    metrics = history.metric_names()
    yield [*_FIELDS, *(f"metric {name}" for name in metrics)]
    pauses, stagings = history.pauses(), history.stagings()
    for facts, density in zip(history.versions, history.densities().tolist(), strict=True):
        record = facts.record
        yield [
            record.version, record.base_version, record.kind, facts.step, record.changed_elements,
            history.total_elements, density, facts.changed_tensors, record.payload_bytes, history.checkpoint_bytes,
            facts.diff_s, facts.upload_s, stagings.get(record.version), pauses.get(record.version), record.created_at,
            *(facts.metrics.get(name) for name in metrics),
        ]  # fmt: skip


def layer_rows(history: RunHistory) -> Iterator[Sequence[Cell]]:
    """Yield the head, and a row for every version and layer of it."""
    yield ["version", "layer", "changed_elements", "elements", "density"]
    for facts in history.versions:
        if facts.changed_by_layer is not None:
            for layer, changed in zip(history.layers, facts.changed_by_layer.tolist(), strict=True):
                yield [facts.version, layer.name, changed, layer.elements, changed / max(1, layer.elements)]


def touched_rows(history: RunHistory, touched: TouchedWeights) -> Iterator[Sequence[Cell]]:
    """Yield the head, and a row for every version: the weights touched so far."""
    yield ["version", "touched_elements", "total_elements", "never_touched_share"]
    for version, elements in zip(touched.versions, touched.elements, strict=True):
        yield [version, elements, history.total_elements, 1 - elements / max(1, history.total_elements)]


def csv_bytes(rows: Iterable[Sequence[Cell]]) -> bytes:
    """Return rows as CSV: UTF-8, a comma between cells, nothing for what is not known."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_safe(cell) for cell in row] for row in rows)
    return text.getvalue().encode()


def _safe(cell: Cell) -> Cell:
    if not isinstance(cell, str):
        return cell
    cell = printable(cell)
    return f"'{cell}" if cell.startswith(_FORMULA) else cell
