# SPDX-License-Identifier: Apache-2.0
"""How whoever drives an engine names a version to it: with its run, and the state that it leads to if that is known."""

from __future__ import annotations

__all__ = ["asked_for"]


def asked_for(version: int, run_id: str | None, state_digest: str | None) -> dict[str, object]:
    """Return the part of an `update_info` that says which version is meant."""
    given = {"version": version, "run": run_id, "digest": state_digest}
    return {name: value for name, value in given.items() if value is not None}
