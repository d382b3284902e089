# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot doctor``: would updates work here? Looks at vLLM, plugin, folders, store, server; at each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from vllm_delta_snapshot.cli.doctor.check import Check
from vllm_delta_snapshot.cli.doctor.environment import model_check, vllm_checks
from vllm_delta_snapshot.cli.doctor.server import server_checks
from vllm_delta_snapshot.cli.doctor.storage import bytes_of_version, stage_check, store_checks
from vllm_delta_snapshot.cli.output import (
    EXIT_PROBLEM,
    EXIT_UNREACHABLE,
    data_only_on_stdout,
    print_json,
    print_table,
)

__all__ = ["run"]


def run(
    sync_dir: str | None, server: str | None, model: str | None, options: Mapping[str, Any], *, as_json: bool
) -> None:
    """Look, print what was found; exit with 1 if something is wrong, with 3 if the store does not answer."""
    table: list[dict[str, str]] | None = None
    with data_only_on_stdout():
        stored = [] if sync_dir is None else list(store_checks(sync_dir))
        is_silent = any(check.is_unreachable for check in stored)
        version_bytes = 0 if sync_dir is None or is_silent else bytes_of_version(sync_dir)
        checks = [*vllm_checks(), stage_check(version_bytes), *stored]
        if server is not None:
            checks += server_checks(server, None if is_silent else sync_dir)
        if model is not None:
            check, table = model_check(model, options)
            checks.append(check)
    is_ok = all(check.is_ok for check in checks)
    if as_json:
        described = [{"name": c.name, "ok": c.is_ok, "detail": c.detail, "hint": c.hint} for c in checks]
        print_json({"ok": is_ok, "checks": described, "apply": table})
    else:
        _print(checks)
        _print_table(table or [])
    if not is_ok:
        raise typer.Exit(EXIT_UNREACHABLE if is_silent else EXIT_PROBLEM)


def _print(checks: list[Check]) -> None:
    for check in checks:
        typer.echo(f"{'ok ' if check.is_ok else 'NO '} {check.name}: {check.detail}")
        if check.hint:
            typer.echo(f"    {check.hint}")


def _print_table(table: list[dict[str, str]]) -> None:
    groups: dict[tuple[str, str], list[str]] = {}
    for row in table:
        groups.setdefault((row["way"], row["reason"]), []).append(row["name"])
    if groups:
        rows = [(way, len(names), names[0], reason) for (way, reason), names in groups.items()]
        print_table(["way", "tensors", "for example", "why"], rows)
