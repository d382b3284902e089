# SPDX-License-Identifier: Apache-2.0
"""What ``doctor`` looks at where bytes lie: stage folder, run, store, mount, clock, room, credentials."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from vllm_delta_snapshot.cli.doctor.check import Check, failed
from vllm_delta_snapshot.cli.output import human_bytes
from vllm_delta_snapshot.errors import DeltaSnapshotError, ObjectNotFound, StoreUnavailable
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import Store, StoreConfig, TellsTime, open_store
from vllm_delta_snapshot.store.base import HasSetUp
from vllm_delta_snapshot.store.credentials import credentials_of
from vllm_delta_snapshot.store.mounts import MOUNTINFO, Mount, mount_of
from vllm_delta_snapshot.store.posix import PosixStore

__all__ = ["bytes_of_version", "clock_check", "mount_check", "stage_check", "store_checks"]

_MOST_SKEW_S: Final = 60.0
_FEW_VERSIONS: Final = 10
_BUCKETS: Final = ("fuse.s3fs", "fuse.rclone", "fuse.gcsfuse", "fuse.mount-s3", "fuse.goofys")
_LOCAL: Final = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs")


def stage_check(version_bytes: int = 0) -> Check:
    """Look whether the stager could write, and whether there is room.

    Args:
        version_bytes: payload of a version of the run; 0 if that is not known.
    """
    from vllm_delta_snapshot.host.area import default_stage_root

    root = default_stage_root()
    try:
        there = next(path for path in (root, *root.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass  # that it can be made is the check: rights alone do not tell for root, nor on a read-only mount
        free = shutil.disk_usage(there).free
    except OSError as error:
        hint = "Set DELTA_SNAPSHOT_STAGE_DIR to a local folder with room."
        return Check("stage folder", False, f"{root} cannot be written: {error.strerror}", hint)
    mount = mount_of(there)
    if mount is not None and mount.is_nfs:
        hint = "Set DELTA_SNAPSHOT_STAGE_DIR to a local folder: workers map files in it, and lock them."
        return Check("stage folder", False, f"{root} lies on NFS ({mount.source})", hint)
    detail = f"{root}, {human_bytes(free)} free"
    if free < _FEW_VERSIONS * version_bytes:
        hint = "Set DELTA_SNAPSHOT_STAGE_DIR to a local folder with more room."
        return Check("stage folder", False, f"{detail}; a version of this run takes {human_bytes(version_bytes)}", hint)
    return Check("stage folder", True, detail)


def store_checks(sync_dir: str) -> Iterator[Check]:
    """Yield what was found of a run and its store. Writes probe objects, and removes them."""
    try:
        folder = RunFolder(open_store(sync_dir))
    except DeltaSnapshotError as error:
        yield failed("run", error)
        return
    if folder.store.uri.startswith(("s3://", "gs://")):
        yield _credentials_check(folder.store.uri)
    if isinstance(folder.store, HasSetUp):
        yield Check("store set-up", True, folder.store.set_up())
    is_there = True
    try:
        run_id = folder.read_run().run_id
        yield Check("run", True, f"{run_id}, newest version {folder.newest()}")
    except ObjectNotFound as error:
        # A trainer makes run.json when it starts. Until then the store itself can be looked at.
        is_there = _is_store_there(folder.store)
        yield failed("run", error)
    except DeltaSnapshotError as error:
        yield failed("run", error)
        is_there = not isinstance(error, StoreUnavailable)
    if not is_there:
        return
    yield _create_check(folder.store)
    yield clock_check(folder.store)
    if isinstance(folder.store, PosixStore):
        yield mount_check(folder.store.root)
        yield _room_check(folder)


def _is_store_there(store: Store) -> bool:
    """Say whether there is something to look at; a folder is not made for it."""
    return not isinstance(store, PosixStore) or store.root.is_dir()


def _credentials_check(uri: str) -> Check:
    try:
        return Check("credentials", True, credentials_of(uri, StoreConfig.load()))
    except DeltaSnapshotError as error:
        return failed("credentials", error)


def _create_check(store: Store) -> Check:
    try:
        store.check_exclusive_create()
        return Check("exclusive create", True, "works (a trainer may publish from here)")
    except StoreUnavailable as error:
        return failed("exclusive create", error)
    except DeltaSnapshotError as error:
        # Engines only read.
        return Check("exclusive create", True, f"not possible from here: {error}", "Only the trainer needs it.")


def clock_check(store: Store) -> Check:
    """Compare this machine's clock with the store's."""
    if not isinstance(store, TellsTime):
        return Check("clock", True, "the store has none")
    try:
        before = time.time()
        theirs = store.now()
        ours = (before + time.time()) / 2
    except DeltaSnapshotError as error:
        try:
            store.list("")  # engines need that; a store that merely tells no time gives it
        except DeltaSnapshotError as refused:
            return failed("clock", refused)
        return Check("clock", True, f"cannot be compared from here: {error}")
    behind = theirs - ours
    side = "behind" if behind > 0 else "ahead of"
    if abs(behind) > _MOST_SKEW_S:
        hint = (
            "Set it by NTP. S3 refuses requests of a clock that is 15 minutes off, and `prune` takes acknowledgements "
            "for older or younger than they are. Versions are ordered by number, never by time."
        )
        return Check("clock", False, f"this machine's is {abs(behind):.0f} s {side} the store's", hint)
    return Check("clock", True, f"within {max(1.0, abs(behind)):.0f} s of the store's")


def mount_check(root: Path, mountinfo: Path = MOUNTINFO) -> Check:
    """Say on what a run's folder lies, and when new versions are seen there.

    Args:
        root: the run's folder.
        mountinfo: a file in the form of ``/proc/self/mountinfo``.
    """
    mount = mount_of(root, mountinfo)
    if mount is None:
        return Check("file system", True, "not known here")
    what = f"{mount.kind} ({mount.source} at {mount.point})"
    if mount.kind in _BUCKETS:
        hint = "A mounted bucket has no hard links, and its folders change piece by piece: give s3://... or gs://..."
        return Check("file system", False, what, hint)
    if mount.is_nfs:
        return _nfs_check(what, mount)
    hint = "A local disk: other hosts do not see it, unless it is exported to them." if mount.kind in _LOCAL else ""
    return Check("file system", True, what, hint)


def _nfs_check(what: str, mount: Mount) -> Check:
    names = ("vers", "noac", "actimeo", "acregmin", "acregmax", "acdirmin", "acdirmax", "lookupcache", "nocto", "soft")
    given = [f"{name}={mount.options[name]}".rstrip("=") for name in names if name in mount.options]
    what = f"{what}, {' '.join(given) or 'default options'}"
    if "nocto" in mount.options:
        longest = mount.options.get("actimeo") or mount.options.get("acdirmax", "60")
        hint = (
            f"With nocto a listing may be {longest} s old, and so long a new version is not seen: mount it without, or "
            "with actimeo=1."
        )
        return Check("file system", False, what, hint)
    if mount.options.keys() & {"soft", "softerr"}:
        hint = "With soft a slow server becomes an I/O error in the middle of a write: mount it hard."
        return Check("file system", False, what, hint)
    if "noac" in mount.options:
        hint = "New versions are seen at once; noac is not needed for it, and makes every access slower."
    else:
        hint = (
            "New versions are seen at once: their folder is opened and listed, which asks the server. A name that was "
            f"looked up in vain is hidden for up to {_negative_s(mount)} s; nothing here looks up names that way."
        )
    return Check("file system", True, what, hint)


def _negative_s(mount: Mount) -> str:
    if mount.options.get("lookupcache") in ("pos", "positive", "none"):
        return "0"
    return mount.options.get("actimeo") or mount.options.get("acdirmin", "30")


def _room_check(folder: RunFolder) -> Check:
    root = folder.store.uri
    free = shutil.disk_usage(root).free
    each = bytes_of_version(root)
    if not each:
        return Check("room for the run", True, f"{human_bytes(free)} free")
    detail = f"{human_bytes(free)} free, room for about {free // each:,} versions like the newest"
    if free < _FEW_VERSIONS * each:
        hint = f"Make room: delta-snapshot prune {root} shows what is not needed."
        return Check("room for the run", False, detail, hint)
    return Check("room for the run", True, detail)


def bytes_of_version(sync_dir: str) -> int:
    """Return the payload of the newest version; 0 where that is not known."""
    try:
        folder = RunFolder(open_store(sync_dir))
        versions = folder.versions()
        return folder.read_version(versions[-1]).payload_bytes if versions else 0
    except DeltaSnapshotError:
        return 0
