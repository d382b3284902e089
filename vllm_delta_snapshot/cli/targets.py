# SPDX-License-Identifier: Apache-2.0
"""What the targets of a verb name: a run of ours or a chain of foreign deltas; and where its base checkpoint is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.checkpoint.base_folder import is_folder
from vllm_delta_snapshot.checkpoint.hub_cache import HubId
from vllm_delta_snapshot.cli.output import EXIT_USAGE, open_run, reported, split_target
from vllm_delta_snapshot.errors import CompatibilityError, ObjectNotFound
from vllm_delta_snapshot.interop.chain import FolderKind, ForeignChain, find_chain, kind_of
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store
from vllm_delta_snapshot.store.posix import PosixStore

__all__ = [
    "base_at_hand",
    "base_of_chain",
    "base_of_run",
    "base_or_anchor",
    "find_foreign",
    "open_run_at",
    "split_folder",
]


def split_folder(target: str) -> tuple[Path | None, int | None]:
    """Return the local folder that a target names, and the version after ``@``. A folder of that very name comes first.

    The folder is ``None`` where the target is in a bucket.

    Raises:
        CompatibilityError: there is no store of that kind.
    """
    whole = _folder(target)
    if whole is not None and whole.is_dir():
        return whole, None
    name, version = split_target(target)
    return _folder(name), version


def open_run_at(target: str) -> tuple[RunFolder, int]:
    """Open the run that a target names; return it with the version after ``@``, by default its newest.

    Raises:
        DeltaSnapshotError: there is none, or it cannot be read.
    """
    sync_dir, version = split_target(target)
    folder = open_run(sync_dir)
    return folder, folder.newest() if version is None else version


def find_foreign(targets: Sequence[str]) -> ForeignChain | None:
    """Return the chain of foreign deltas that targets name; ``None`` for a run, and for what its reader must explain.

    Raises:
        DeltaSnapshotError: see `find_chain`.
    """
    if len(targets) > 1:
        return find_chain([_local(target) for target in targets])
    folder, version = split_folder(targets[0])
    if folder is None or kind_of(folder) in (None, FolderKind.RUN):
        return None
    return find_chain([folder], version=version)


def base_of_run(folder: RunFolder, base: str | None, *, command: str, as_json: bool) -> Checkpoint:
    """Return the base checkpoint of a run: where the user says it is, or else where the trainer had it.

    Args:
        folder: the run.
        base: what the user says.
        command: the command so far, for the hint.
        as_json: whether ``--json`` was given.

    Raises:
        Exit: the user has to say it.
        ObjectNotFound, CorruptFile, UnsupportedFormat: see `Checkpoint`.
    """
    if base is not None:
        return Checkpoint(base)
    checkpoint = base_at_hand(folder, None)
    if checkpoint is None:
        name = Path(folder.read_run().base.name)
        with reported(as_json=as_json, code=EXIT_USAGE):
            raise ObjectNotFound(
                "the base checkpoint, where the trainer had it, is not on this machine",
                file=str(name),
                hint=f"Say where it is: {command} --base {HubId.of_snapshot(name) or 'FOLDER'}",
            )
    return checkpoint


def base_at_hand(folder: RunFolder, base: str | None) -> Checkpoint | None:
    """Return the base checkpoint of a run: where the user says it is, or where the trainer had it, if it is here.

    Args:
        folder: the run.
        base: what the user says.

    Raises:
        ObjectNotFound, CorruptFile, UnsupportedFormat, StoreError: see `Checkpoint`.
    """
    if base is not None:
        return Checkpoint(base)
    place = Path(folder.read_run().base.name)
    return Checkpoint(place) if is_folder(place) else None


def base_or_anchor(
    folder: RunFolder, version: int, base: str | None, *, command: str, as_json: bool
) -> Checkpoint | None:
    """Return the base checkpoint of a run as `base_of_run` does; ``None`` if it is not here but an anchor serves.

    Args:
        folder: the run.
        version: the version to reach.
        base: what the user says.
        command: the command so far, for the hint.
        as_json: whether ``--json`` was given.

    Raises:
        Exit, ObjectNotFound, CorruptFile, UnsupportedFormat: see `base_of_run`.
    """
    checkpoint = base_at_hand(folder, base)
    if checkpoint is None and not any(number <= version for number in folder.shortcuts().anchors):
        return base_of_run(folder, base, command=command, as_json=as_json)
    return checkpoint


def base_of_chain(base: str | None, *, command: str, as_json: bool) -> Checkpoint:
    """Return the base checkpoint of a foreign chain, which only the user can say.

    Args:
        base: what the user says.
        command: the command so far, for the hint.
        as_json: whether ``--json`` was given.

    Raises:
        Exit: the user has to say it.
        ObjectNotFound, CorruptFile, UnsupportedFormat: see `Checkpoint`.
    """
    if base is None:
        with reported(as_json=as_json, code=EXIT_USAGE):
            raise ObjectNotFound(
                "deltas of SkyRL and OpenRL do not say where the checkpoint is that they start from",
                hint=f"Say it: {command} --base FOLDER",
            )
    return Checkpoint(base)


def _local(target: str) -> Path:
    folder = _folder(target)
    if folder is None:
        raise CompatibilityError(
            "deltas of other tools are read from local folders", file=target, hint="Copy them to a folder first."
        )
    return folder


def _folder(target: str) -> Path | None:
    if "://" not in target:
        return Path(target).expanduser()
    store = open_store(target)
    return store.root if isinstance(store, PosixStore) else None
