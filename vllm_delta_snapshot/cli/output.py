# SPDX-License-Identifier: Apache-2.0
"""What all verbs share: data on stdout, the rest on stderr, errors as one paragraph, exit codes.

0 ok; 1 a problem was found; 2 wrong usage; 3 the store is unreachable.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from vllm_delta_snapshot.errors import (
    CompatibilityError,
    DeltaSnapshotError,
    LimitExceeded,
    ObjectNotFound,
    StoreUnavailable,
)
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.report.text import human_bytes, printable
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store
from vllm_delta_snapshot.util.traffic import moved_bytes

__all__ = [
    "EXIT_PROBLEM",
    "EXIT_UNREACHABLE",
    "EXIT_USAGE",
    "fail",
    "human_bytes",
    "open_run",
    "reported",
    "split_target",
]

EXIT_PROBLEM: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNREACHABLE: Final = 3


@contextlib.contextmanager
def reported(*, as_json: bool, code: int = EXIT_PROBLEM) -> Iterator[None]:
    """Turn an error of ours into a message and an exit code. With ``--json`` it is also an object on stdout.

    Args:
        as_json: whether ``--json`` was given.
        code: the exit code of errors that have none of their own.
    """
    try:
        yield
    except DeltaSnapshotError as error:
        if as_json:
            print_json({"ok": False, "error": error.to_fields()})
        if isinstance(error, StoreUnavailable):
            code = EXIT_UNREACHABLE
        elif isinstance(error, CompatibilityError | LimitExceeded):
            code = EXIT_USAGE
        fail(str(error), code)


def fail(message: str, code: int) -> None:
    """Print a message to stderr and exit."""
    typer.echo(message, err=True)
    raise typer.Exit(code)


def open_run(sync_dir: str) -> RunFolder:
    """Open a run and read its run.json.

    Raises:
        DeltaSnapshotError: there is none, or it cannot be read.
    """
    folder = RunFolder(open_store(sync_dir))
    try:
        folder.read_run()
    except ObjectNotFound as error:
        hint = _what_else(sync_dir)
        raise ObjectNotFound(error.what, file=error.file, hint=hint or error.hint) from error
    return folder


def _what_else(sync_dir: str) -> str | None:
    """Return what to do where a local sync_dir is no run, if it can be seen what it is instead."""
    name, version = split_target(sync_dir)
    if version is not None and (Path(name) / layout.RUN_KEY).is_file():
        return f"This verb takes the run as a whole: delta-snapshot ... {shlex.quote(name)}"
    path = Path(sync_dir).expanduser().absolute()
    if "://" in sync_dir or not path.is_dir():
        return None
    for parent in path.parents[:3]:
        if (parent / layout.RUN_KEY).is_file():
            return f"It is a part of the run in {parent}: delta-snapshot log {shlex.quote(str(parent))}"
    if any(path.glob("*.safetensors")):
        return "It holds a checkpoint or a delta: delta-snapshot inspect takes a run, a version or a delta's folder."
    return None


def split_target(target: str) -> tuple[str, int | None]:
    """Split ``SYNC_DIR@N`` into its parts."""
    match = re.fullmatch(r"(.+)@(\d{1,8})", target)
    return (match[1], int(match[2])) if match else (target, None)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object to stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_fields(fields: Mapping[str, object]) -> None:
    """Print names and values, one a line, aligned."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        typer.echo(f"{name:<{width}}  {value}")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table to stdout; the first column is text, the others are numbers unless they begin with a letter."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        is_text = number == 0 or column in ("metrics", "dtype", "created", "kept", "file", "for example", "why", "what")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(printable(str(cell)) for cell in row))
    # Not a terminal: no width to fit into, so nothing is cut. Names may have brackets: they are no markup.
    width = None if sys.stdout.isatty() else 1_000_000
    Console(width=width, highlight=False, markup=False, emoji=False).print(table)


@contextlib.contextmanager
def data_only_on_stdout() -> Iterator[None]:
    """Send to stderr what libraries print meanwhile: vLLM's log, which is on stdout by default, and C code too."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class _Moved(ProgressColumn):
    """How many bytes were moved since it was made, and how many a second just now."""

    def __init__(self, moved: Callable[[], int]) -> None:
        super().__init__()
        self._moved = moved
        self._first = moved()
        self._seen: deque[tuple[float, int]] = deque(maxlen=32)

    def render(self, task: Task) -> Text:
        """See `ProgressColumn`."""
        del task
        now, moved = time.monotonic(), self._moved() - self._first
        self._seen.append((now, moved))
        then, before = self._seen[0]
        rate = (moved - before) / (now - then) if now > then else 0.0
        return Text(f"{human_bytes(moved)}  {human_bytes(int(rate))}/s")


class _Counted(ProgressColumn):
    """How many of how many are done."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        """See `ProgressColumn`."""
        if task.total is None:
            return Text("")
        if self._unit == "bytes":
            return Text(f"{human_bytes(int(task.completed))} of {human_bytes(int(task.total))}")
        return Text(f"{task.completed:.0f}/{task.total:.0f} {self._unit}")


@contextlib.contextmanager
def progress_bar(
    title: str, *, as_json: bool, unit: str = "versions", moved: Callable[[], int] = moved_bytes
) -> Iterator[Progress]:
    """Show a progress bar on stderr; none if that is no terminal, with ``--json``, or if the user wants none.

    Args:
        title: what is being done.
        as_json: whether ``--json`` was given.
        unit: what is counted.
        moved: returns how many bytes were moved so far; by default all that this process moves.
    """
    is_off = as_json or not sys.stderr.isatty() or bool(os.environ.get("DELTA_SNAPSHOT_NO_PROGRESS"))
    columns = (TextColumn(title), BarColumn(), _Counted(unit), _Moved(moved), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=is_off, transient=True) as progress:
        yield progress
