# SPDX-License-Identifier: Apache-2.0
"""One thing that ``doctor`` looked at."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_delta_snapshot.errors import DeltaSnapshotError, StoreUnavailable

__all__ = ["Check", "failed"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what.
        is_ok: whether it is as it should be.
        detail: what was found.
        hint: the next thing to do.
        is_unreachable: whether it is a store that does not answer.
    """

    name: str
    is_ok: bool
    detail: str
    hint: str = ""
    is_unreachable: bool = False


def failed(name: str, error: DeltaSnapshotError) -> Check:
    """Return the check that an error is what was found."""
    return Check(name, False, str(error), is_unreachable=isinstance(error, StoreUnavailable))
