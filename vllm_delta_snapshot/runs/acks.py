# SPDX-License-Identifier: Apache-2.0
"""Acknowledgements: which version each sampler serves, told through the store, the only thing that both sides see.

::

    <sync_dir>/acks/<sampler>/<number>.json

Every acknowledgement is a new object, created exclusively; the one with the highest number is what holds, since no
store has to replace one. A sampler removes its own older ones.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from pydantic import Field

from vllm_delta_snapshot.errors import (
    CorruptFile,
    DeltaSnapshotError,
    FormatError,
    ObjectExists,
    ObjectNotFound,
    RunMismatch,
    StageError,
    StoreError,
)
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.layout import ACKS_FOLDER, MAX_VERSION
from vllm_delta_snapshot.format.run import RunId
from vllm_delta_snapshot.format.wire import WireModel
from vllm_delta_snapshot.store import Store

__all__ = ["Acknowledgement", "Acknowledger", "check_sampler", "read_acknowledgements", "wait_applied"]

_SAMPLER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NUMBER: Final = re.compile(r"(\d{8})\.json")
_MAX_BYTES: Final = 1 << 16
_MAX_NUMBER: Final = 99_999_999
_KEPT: Final = 2
"""How many of its own a sampler leaves: a reader that has listed one may read it yet."""
_POLL_S: Final = (0.05, 1.0)


class Acknowledgement(WireModel):
    """What a sampler says.

    Attributes:
        run_id: the run that it follows.
        sampler: its name.
        version: the version that it serves.
        applied_at: when it had it, in seconds since 1970, by its own clock.
        pause_s: for how long generation stood still.
        stage_s: from finding the version until it was staged and checked; ``None`` where that is not known.
    """

    format: Literal["delta_snapshot_ack"] = "delta_snapshot_ack"
    format_version: Literal[1] = 1
    run_id: RunId
    sampler: str
    version: int = Field(ge=0, le=MAX_VERSION)
    applied_at: float
    pause_s: float
    stage_s: float | None = None


def check_sampler(name: str) -> str:
    """Return a sampler's name.

    Raises:
        FormatError: it cannot be one.
    """
    if not _SAMPLER.fullmatch(name):
        raise FormatError(
            "not a name for a sampler", expected="letters, digits, dots, dashes, underscores", found=repr(name)
        )
    return name


class Acknowledger:
    """Writes one sampler's acknowledgements. Blocks.

    Args:
        store: the run's.
        run_id: the run.
        sampler: the sampler's name: no two have the same.
    """

    def __init__(self, store: Store, run_id: str, sampler: str) -> None:
        self._store = store
        self._run_id = run_id
        self._sampler = check_sampler(sampler)
        self._folder = f"{ACKS_FOLDER}/{self._sampler}"
        self._next: int | None = None

    def write(self, version: int, *, pause_s: float, stage_s: float | None = None) -> None:
        """Say that the sampler serves `version`.

        Raises:
            StoreError: it could not be written; say it again later.
        """
        data = Acknowledgement(
            run_id=self._run_id,
            sampler=self._sampler,
            version=version,
            applied_at=time.time(),
            pause_s=pause_s,
            stage_s=stage_s,
        ).to_json()
        if self._next is None:
            self._next = max(_numbers(self._store, self._folder), default=0) + 1
        if self._next > _MAX_NUMBER:  # no follower gets there by itself; a longer name would be seen by nobody
            self._next = None
            raise StoreError(
                f"version {version} cannot be acknowledged: a stray acknowledgement has the last number",
                file=f"{self._store.uri}/{self._folder}/{_MAX_NUMBER:08d}.json",
                hint="Delete that file; this is said again with the next version.",
            )
        try:
            self._store.create(f"{self._folder}/{self._next:08d}.json", data)
        except ObjectExists:
            # One of an attempt whose answer was lost, or of another follower of that name: the next number tells.
            self._next = None
            self.write(version, pause_s=pause_s, stage_s=stage_s)
            return
        self._next += 1
        for number in sorted(_numbers(self._store, self._folder))[:-_KEPT]:
            with contextlib.suppress(StoreError):  # it is in nobody's way
                self._store.delete(f"{self._folder}/{number:08d}.json")


def read_acknowledgements(
    store: Store, run_id: str, samplers: Iterable[str] | None = None, *, newest: int | None = None
) -> dict[str, Acknowledgement]:
    """Return what each sampler said last, by name; without those that said nothing yet.

    Args:
        store: the run's.
        run_id: the run.
        samplers: their names; by default all that have said something.
        newest: the run's newest version, if the caller knows it: nobody can serve a later one.

    Raises:
        RunMismatch: one is of another run.
        CorruptFile: one is of another sampler than its folder, or of a version that does not exist.
        FormatError: one cannot be read.
        StoreUnavailable: try again.
    """
    if samplers is None:
        samplers = [name for name in store.list(ACKS_FOLDER) if _SAMPLER.fullmatch(name)]
    found = {name: _newest(store, check_sampler(name)) for name in samplers}
    for name, said in found.items():
        if said is not None:
            _check(said, name, run_id, newest, file=f"{store.uri}/{ACKS_FOLDER}/{name}")
    return {name: said for name, said in found.items() if said is not None}


def wait_applied(
    store: Store, run_id: str, version: int, samplers: Iterable[str], *, timeout_s: float
) -> Mapping[str, Acknowledgement]:
    """Wait until every sampler serves `version` or a later one. Blocks.

    Args:
        store: the run's.
        run_id: the run.
        version: the version.
        samplers: their names.
        timeout_s: how long to wait.

    Returns:
        What each said last.

    Raises:
        StageError: they did not in time; names those that lag, and where they are.
        DeltaSnapshotError: see `read_acknowledgements`.
    """
    names = tuple(samplers)
    deadline = time.monotonic() + timeout_s
    wait_s, longest_s = _POLL_S
    while True:
        said: Mapping[str, Acknowledgement] = {}
        failure: DeltaSnapshotError | None = None
        try:
            said = read_acknowledgements(store, run_id, names)
        except ObjectNotFound as error:
            failure = error  # the sampler removed it since it was listed
        lagging = [name for name in names if name not in said or said[name].version < version]
        if failure is None and not lagging:
            ahead = [name for name in names if said[name].version > version]
            newest = max(version, _newest_version(store)) if ahead else version
            for name in ahead:
                _check(said[name], name, run_id, newest, file=f"{store.uri}/{ACKS_FOLDER}/{name}")
            return said
        if time.monotonic() >= deadline:
            raise StageError(
                f"version {version} was not acknowledged in time",
                file=f"{store.uri}/{ACKS_FOLDER}",
                expected=f"at most {timeout_s:g} s",
                found=", ".join(
                    f"{name} at version {said[name].version}" if name in said else f"nothing of {name}"
                    for name in lagging
                ),
                hint="Look at those followers: their logs, and /status.",
            ) from failure
        time.sleep(min(wait_s, max(0.0, deadline - time.monotonic())))
        wait_s = min(2 * wait_s, longest_s)


def _check(said: Acknowledgement, sampler: str, run_id: str, newest: int | None, *, file: str) -> None:
    """Believe nothing that cannot be: another run, another sampler, a version that does not exist."""
    hint = f"Delete {file}; the sampler's follower, if it lives, says anew what it serves with its next version."
    if said.run_id != run_id:
        expected, found = f"run {run_id}", f"run {said.run_id}"
        raise RunMismatch(
            "an acknowledgement belongs to another run", file=file, expected=expected, found=found, hint=hint
        )
    if said.sampler != sampler:
        raise CorruptFile(
            "an acknowledgement is of another sampler", file=file, expected=sampler, found=said.sampler, hint=hint
        )
    if newest is not None and said.version > newest:
        raise CorruptFile(
            "an acknowledgement is of a version that does not exist",
            file=file,
            expected=f"version {newest} at most",
            found=f"version {said.version}",
            hint=hint,
        )


def _newest_version(store: Store) -> int:
    numbers = map(layout.version_of_key, store.list(layout.VERSIONS_FOLDER))
    return max((number for number in numbers if number is not None), default=0)


def _newest(store: Store, sampler: str) -> Acknowledgement | None:
    folder = f"{ACKS_FOLDER}/{sampler}"
    number = max(_numbers(store, folder), default=None)
    if number is None:
        return None
    key = f"{folder}/{number:08d}.json"
    where = f"{store.uri}/{key}"
    try:
        return Acknowledgement.from_json(store.read(key, max_bytes=_MAX_BYTES), file=where)
    except FormatError as error:
        hint = "Delete that file; the sampler's follower, if it lives, says anew what it serves with its next version."
        raise error.placed(file=where, hint=hint) from error


def _numbers(store: Store, folder: str) -> list[int]:
    matches = map(_NUMBER.fullmatch, store.list(folder))
    return [int(match[1]) for match in matches if match]
