# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot diff``: which tensors differ between two versions or checkpoints, and how far."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from vllm_delta_snapshot.audit.compare_checkpoints import compare_checkpoints
from vllm_delta_snapshot.audit.compare_versions import compare_versions
from vllm_delta_snapshot.audit.comparison import Comparison, TensorComparison
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.cli.output import EXIT_PROBLEM, EXIT_USAGE, print_json, print_table, progress_bar, reported
from vllm_delta_snapshot.cli.targets import base_at_hand, base_of_run, open_run_at, split_folder
from vllm_delta_snapshot.errors import ObjectNotFound
from vllm_delta_snapshot.format.layout import RUN_KEY
from vllm_delta_snapshot.report.text import counted, percent
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.replay import check_base
from vllm_delta_snapshot.runs.run_folder import RunFolder

__all__ = ["run"]

_MOST_ROWS = 20
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Version:
    """A version of a run."""

    folder: RunFolder
    version: int

    def __str__(self) -> str:
        return f"{self.folder.store.uri}@{self.version}"


def run(a: str, b: str, base: str | None, *, as_json: bool) -> None:
    """Compare and say what differs. Exits with 1 if anything does, as ``diff`` does."""
    command = f"delta-snapshot diff {a} {b}"
    with reported(as_json=as_json, code=EXIT_USAGE), progress_bar("comparing", as_json=as_json, unit="steps") as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        places = _place(a), _place(b)
        found = _compare(*places, base, progress, command=command, as_json=as_json)
    if as_json:
        print_json({"ok": True, "same": found.is_same, "a": str(places[0]), "b": str(places[1]), **_as_json(found)})
    else:
        _print(found)
    if not found.is_same:
        raise typer.Exit(EXIT_PROBLEM)


def _place(target: str) -> _Version | Path:
    """Return what a target names: a local folder that holds no run is a checkpoint."""
    folder, number = split_folder(target)
    if folder is not None and not folder.is_dir():
        raise ObjectNotFound(
            "no such folder",
            file=str(folder),
            hint="Give a version (SYNC_DIR@N), a run (its newest version), or a folder with safetensors files.",
        )
    if folder is not None and number is None and not (folder / RUN_KEY).is_file():
        return folder
    return _Version(*open_run_at(target))


def _compare(
    a: _Version | Path, b: _Version | Path, base: str | None, progress: Progress, *, command: str, as_json: bool
) -> Comparison:
    if isinstance(a, _Version) and isinstance(b, _Version) and _is_one_run(a, b):
        return compare_versions(
            a.folder, a.version, b.version, find_base=lambda: base_at_hand(a.folder, base), progress=progress
        )
    with contextlib.ExitStack() as stack:
        made = [_as_checkpoint(place, base, stack, command=command, as_json=as_json) for place in (a, b)]
        return compare_checkpoints(*made, progress=progress)


def _is_one_run(a: _Version, b: _Version) -> bool:
    return a.folder.read_run().run_id == b.folder.read_run().run_id


def _as_checkpoint(
    place: _Version | Path, base: str | None, stack: contextlib.ExitStack, *, command: str, as_json: bool
) -> Checkpoint:
    """Return a checkpoint; a version is written out for as long as `stack` lasts."""
    if isinstance(place, Path):
        return Checkpoint(place)
    if place.version == 0:
        checkpoint = base_of_run(place.folder, base, command=command, as_json=as_json)
        check_base(place.folder.read_run(), checkpoint)
        return checkpoint
    temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="delta-snapshot-"))
    materialize(place.folder, base_at_hand(place.folder, base), place.version, Path(temporary) / "made")
    return Checkpoint(Path(temporary) / "made")


def _as_json(found: Comparison) -> dict[str, Any]:
    return {
        "exact": found.is_exact,
        "num_tensors": found.num_tensors,
        "differing_tensors": len(found.tensors),
        "changed_elements": found.changed_elements,
        "total_elements": found.total_elements,
        "tensors": [_tensor_as_json(tensor) for tensor in found.tensors],
    }


def _tensor_as_json(tensor: TensorComparison) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype_a": tensor.a.dtype if tensor.a else None,
        "dtype_b": tensor.b.dtype if tensor.b else None,
        "shape_a": list(tensor.a.shape) if tensor.a else None,
        "shape_b": list(tensor.b.shape) if tensor.b else None,
        "changed": tensor.changed,
        "density": tensor.density,
        "max_ulp": tensor.max_ulp,
        "nan": tensor.num_nan,
        "exact": tensor.is_exact,
    }


def _print(found: Comparison) -> None:
    if found.is_same:
        elements = counted(found.total_elements, "element")
        typer.echo(f"same: {counted(found.num_tensors, 'tensor')}, {elements}, every bit")
        return
    most = "" if found.is_exact else "at most "
    typer.echo(
        f"{len(found.tensors):,} of {counted(found.num_tensors, 'tensor')} differ, in {most}"
        f"{found.changed_elements:,} of {counted(found.total_elements, 'element')} "
        f"({percent(found.changed_elements / max(1, found.total_elements))})\n"
    )
    print_table(("tensor", "what", "changed", "density", "max ulp"), [_row(t) for t in found.tensors[:_MOST_ROWS]])
    if len(found.tensors) > _MOST_ROWS:
        typer.echo(f"and {len(found.tensors) - _MOST_ROWS} more; --json lists all")
    if not found.is_exact:
        typer.echo(
            "\nWhere versions hold absolute values, some may be the same as before; with the base checkpoint it is "
            "known: --base FOLDER"
        )


def _row(tensor: TensorComparison) -> list[object]:
    if tensor.a is None or tensor.b is None:
        return [tensor.name, "only in A" if tensor.b is None else "only in B", "", "", ""]
    if tensor.changed is None:
        return [tensor.name, f"{tensor.a} in A, {tensor.b} in B", "", "", ""]
    return [
        tensor.name,
        str(tensor.a),
        f"{'' if tensor.is_exact else '<= '}{tensor.changed:,}",
        percent(tensor.density or 0.0),
        "" if tensor.max_ulp is None else f"{tensor.max_ulp:,}",
    ]
