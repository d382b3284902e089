# SPDX-License-Identifier: Apache-2.0
"""What a trainer wants recorded beside a version: its step and its metrics, as they can be recorded.

Invariant: nothing here is raised. A reward that is NaN, or a metric of an odd kind, must not keep weights from engines;
it is left out, and a warning says which and why, once for each name.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Mapping
from typing import Final

from vllm_delta_snapshot.runs.delta_folder import WriterNotes

__all__ = ["notes_of"]

logger = logging.getLogger(__name__)

MOST_METRICS: Final = 1000
LONGEST_NAME: Final = 200
_LARGEST_STEP: Final = 2**63
_MOST_WARNINGS: Final = 1000
_warned: set[str] = set()


def notes_of(base_model: str, step: object, metrics: object) -> WriterNotes:
    """Return what can be recorded of what the caller gives. Blocks for numbers that lie on a device.

    Args:
        base_model: the base, as the run names it.
        step: an integer, or what is as good as one; else it is left out.
        metrics: a mapping from names to numbers: Python's, numpy's, or tensors of one element. What is no finite
            number, what has no name or a longer one than 200 letters, and all after the first 1000, are left out.
    """
    return WriterNotes(base_model, _step_of(step), _metrics_of(metrics))


def _step_of(step: object) -> int | None:
    if step is None:
        return None
    try:
        number = int(step) if isinstance(step, float) and step.is_integer() else operator.index(step)  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 - whatever kind of number it is, it keeps no weights back
        _leave_out("step", f"{type(step).__name__} is no integer: {error}")
        return None
    if abs(number) >= _LARGEST_STEP:
        _leave_out("step", "it has more than 63 bits")
        return None
    return number


def _metrics_of(metrics: object) -> dict[str, float]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        _leave_out("metrics", f"{type(metrics).__name__} is no mapping from names to numbers")
        return {}
    found: dict[str, float] = {}
    try:
        items = list(metrics.items())
    except Exception as error:  # noqa: BLE001 - a mapping of the caller's, which may be anything
        _leave_out("metrics", f"{type(metrics).__name__} cannot be gone through: {error}")
        return {}
    for key, value in items:
        name = _name_of(key)
        number = None if name is None else _number_of(name, value)
        if name is None or number is None:
            continue
        if len(found) == MOST_METRICS:
            _leave_out("metrics", f"there are {len(items)}, and {MOST_METRICS} are recorded")
            break
        found[name] = number
    return found


def _name_of(key: object) -> str | None:
    try:
        name = key if isinstance(key, str) else str(key)
        name.encode()
    except Exception as error:  # noqa: BLE001 - names come from anywhere
        _leave_out(f"metric of type {type(key).__name__}", f"its name cannot be written: {type(error).__name__}")
        return None
    if len(name) > LONGEST_NAME:
        _leave_out(f"metric {name[:40]}...", f"its name has more than {LONGEST_NAME} letters")
        return None
    return name


def _number_of(name: str, value: object) -> float | None:
    if isinstance(value, str | bytes | bytearray):
        _leave_out(f"metric {name}", "text is no number")
        return None
    try:
        detached = value.detach() if hasattr(value, "detach") else value
        number = float(detached.item() if hasattr(detached, "item") else detached)  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 - the same: arrays, None, what overflows, what a device refuses
        _leave_out(f"metric {name}", f"{type(value).__name__} is no single number: {error}")
        return None
    if not math.isfinite(number):
        _leave_out(f"metric {name}", f"it is {number}, not a finite number")
        return None
    return number


def _leave_out(what: str, why: str) -> None:
    if what in _warned or len(_warned) >= _MOST_WARNINGS:
        logger.debug("left out %s: %s", what, why)
        return
    _warned.add(what)
    logger.warning("%s is not recorded: %s (said once)", what, why[:300])
