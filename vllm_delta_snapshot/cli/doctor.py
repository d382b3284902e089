# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot doctor``: would updates work here? Looks at vLLM, plugin, folders; with a model, at each tensor."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer

from vllm_delta_snapshot._version import __version__
from vllm_delta_snapshot.cli.output import EXIT_PROBLEM, data_only_on_stdout, human_bytes, print_json, print_table
from vllm_delta_snapshot.errors import DeltaSnapshotError
from vllm_delta_snapshot.plugin import BACKEND

__all__ = ["run"]

_GROUP: Final = "vllm.general_plugins"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what.
        is_ok: whether it is as it should be.
        detail: what was found.
        hint: the next thing to do.
    """

    name: str
    is_ok: bool
    detail: str
    hint: str = ""


def run(sync_dir: str | None, model: str | None, options: Mapping[str, Any], *, as_json: bool) -> None:
    """Look, print what was found, and exit with 1 if something is wrong."""
    table: list[dict[str, str]] | None = None
    with data_only_on_stdout():
        checks = [*_vllm_checks(), _stage_check()]
        if sync_dir is not None:
            checks += _store_checks(sync_dir)
        if model is not None:
            check, table = _model_check(model, options)
            checks.append(check)
    is_ok = all(check.is_ok for check in checks)
    if as_json:
        described = [{"name": c.name, "ok": c.is_ok, "detail": c.detail, "hint": c.hint} for c in checks]
        print_json({"ok": is_ok, "checks": described, "apply": table})
    else:
        for check in checks:
            typer.echo(f"{'ok ' if check.is_ok else 'NO '} {check.name}: {check.detail}")
            if check.hint:
                typer.echo(f"    {check.hint}")
        _print_table(table or [])
    if not is_ok:
        raise typer.Exit(EXIT_PROBLEM)


def _vllm_checks() -> Iterator[Check]:
    yield Check("vllm-delta-snapshot", True, __version__)
    if importlib.util.find_spec("vllm") is None:
        yield Check("vllm", False, "not installed here", "pip install vllm, in the environment of the engine.")
        return
    from vllm_delta_snapshot.engine.compat import check_vllm
    from vllm_delta_snapshot.engine.table import vllm_version

    try:
        check_vllm()
        yield Check("vllm", True, vllm_version())
    except DeltaSnapshotError as error:
        yield Check("vllm", False, str(error))
    yield _plugin_check()
    is_dev = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    hint = "" if is_dev else "Servers need VLLM_SERVER_DEV_MODE=1, or vLLM has no routes for updates."
    yield Check("VLLM_SERVER_DEV_MODE", True, "1" if is_dev else "not set in this shell", hint)


def _plugin_check() -> Check:
    owners = [
        f"{point.value} ({point.dist.name} {point.dist.version})" if point.dist else point.value
        for point in importlib.metadata.entry_points(group=_GROUP)
        if point.name == BACKEND
    ]
    if len(owners) != 1:
        hint = "Install vllm-delta-snapshot in this environment." if not owners else "Uninstall one of them."
        return Check("plugin", False, ", ".join(owners) or "vLLM would not find it", hint)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and BACKEND not in allowed.split(","):
        # vLLM does not strip the names, so one with a space before it is none.
        others = [name for name in map(str.strip, allowed.split(",")) if name not in ("", BACKEND)]
        fixed = ",".join([*others, BACKEND])
        hint = f'Add it: VLLM_PLUGINS="{fixed}" (commas, no spaces), or unset the variable.'
        return Check("plugin", False, f"VLLM_PLUGINS={allowed!r} leaves it out", hint)
    return Check("plugin", True, owners[0])


def _stage_check() -> Check:
    from vllm_delta_snapshot.stage.area import default_stage_root

    root = default_stage_root()
    try:
        there = next(path for path in (root, *root.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass  # that it can be made is the check: rights alone do not tell for root, nor on a read-only mount
        free = human_bytes(shutil.disk_usage(there).free)
    except OSError as error:
        hint = "Set DELTA_SNAPSHOT_STAGE_DIR to a local folder with room."
        return Check("stage folder", False, f"{root} cannot be written: {error.strerror}", hint)
    return Check("stage folder", True, f"{root}, {free} free")


def _store_checks(sync_dir: str) -> Iterator[Check]:
    from vllm_delta_snapshot.run_folder import RunFolder
    from vllm_delta_snapshot.store import open_store

    try:
        folder = RunFolder(open_store(sync_dir))
        run_id = folder.read_run().run_id
        yield Check("run", True, f"{run_id}, newest version {max(folder.versions(), default=0)}")
    except DeltaSnapshotError as error:
        yield Check("run", False, str(error))
        return
    try:
        folder.store.check_exclusive_create()
        yield Check("exclusive create", True, "works (a trainer may publish from here)")
    except DeltaSnapshotError as error:
        # Engines only read.
        yield Check("exclusive create", True, f"not possible from here: {error}", "Only the trainer needs it.")


def _model_check(model: str, options: Mapping[str, Any]) -> tuple[Check, list[dict[str, str]] | None]:
    from vllm_delta_snapshot.engine.table import apply_table

    try:
        choices = apply_table(model, {key: value for key, value in options.items() if value is not None})
    except Exception as error:  # noqa: BLE001 - vLLM's own errors too are findings
        return Check("model", False, f"{type(error).__name__}: {error}"), None
    table = [{"name": name, "way": choice.way, "reason": choice.reason} for name, choice in choices.items()]
    counts = Counter(choice.way for choice in choices.values())
    detail = ", ".join(f"{count} by {way}" for way, count in counts.most_common())
    hint = 'What the engine rightly does not use can be named in init_info {"skip": ...}.' if counts["refused"] else ""
    return Check("model", not counts["refused"], f"{Path(model).name}: {detail}", hint), table


def _print_table(table: list[dict[str, str]]) -> None:
    groups: dict[tuple[str, str], list[str]] = {}
    for row in table:
        groups.setdefault((row["way"], row["reason"]), []).append(row["name"])
    if groups:
        rows = [(way, len(names), names[0], reason) for (way, reason), names in groups.items()]
        print_table(["way", "tensors", "for example", "why"], rows)
