# SPDX-License-Identifier: Apache-2.0
"""The mirror: a host's own copy of the checkpoint, patched in place from version to version.

A plain Hugging Face folder, so layers that can only be loaded whole are reloaded from it, and an engine may start from
it. Beside the weights lie a marker that says which version they are, and a file to lock. An `advance` writes the
journal (the marker names the target), the weights, the marker, each durable before the next; so after a death at any
point the marker says truly whether the weights are old, new or in between. Patches hold absolute values: what is in
between is finished by writing them again.

One process writes, under the exclusive lock; readers hold the shared one. To bring patches, and to make a mirror anew
that cannot be finished, is the caller's part.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.checkpoint.patch_files import copied_files, copy_checkpoint, write_patches
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import BaseMismatch, NotStaged, StageError, VerifyError
from vllm_delta_snapshot.format import digest
from vllm_delta_snapshot.host.mirror_marker import (
    MIRROR_NAME,
    REBUILD,
    Marker,
    Pin,
    Target,
    damage_told,
    locked,
    read_marker,
    reported,
    sync,
    try_lock_mirror,
    write_marker,
)
from vllm_delta_snapshot.types import TensorPatch

__all__ = ["Mirror"]


class Mirror:
    """See the module. Made by `create` and `open`. What it says is as of the last call that made, opened or locked it.

    Attributes:
        folder: its folder.
        checkpoint: the folder as a checkpoint, mapped: its views show what is written later.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._marker = read_marker(folder)
        with damage_told():
            self.checkpoint = Checkpoint(folder)

    @classmethod
    def open(cls, folder: Path) -> Self | None:
        """Return the mirror in a folder; ``None`` if there is none.

        Raises:
            CorruptFile, UnsupportedFormat, LimitExceeded, ObjectNotFound: it is damaged; `remove` it.
            StageError: it cannot be read.
        """
        with reported("cannot open the mirror", folder):
            return cls(folder) if (folder / MIRROR_NAME).exists() else None

    @classmethod
    def started_from(cls, checkpoint: Path) -> Self | None:
        """Return the mirror that an engine's checkpoint is, if what it was made from is still there; ``None`` else.

        Raises: see `open`.
        """
        mirror = cls.open(checkpoint)
        return mirror if mirror is not None and Path(mirror.made_from).is_dir() else None

    @classmethod
    def create(cls, folder: Path, checkpoint: Checkpoint, *, run_id: str, version: int, state_digest: str) -> Self:
        """Copy a checkpoint to the new folder `folder`, durably; it appears whole or not at all. Blocks.

        Args:
            folder: must not exist, or be empty.
            checkpoint: what to copy.
            run_id: the run that it is a version of.
            version: the version that it is.
            state_digest: its state digest; the copy is read back and compared.

        Raises:
            StageError: no room, or the folder is in use or cannot be written; nothing is left behind.
            VerifyError: the copy has another state digest; nothing is left behind.
        """
        marker = Marker(
            mirror_id=uuid.uuid4().hex,
            run_id=run_id,
            version=version,
            state_digest=state_digest,
            advancing_to=None,
            checkpoint=str(checkpoint.folder),
        )
        work = folder.with_name(f".{folder.name}.{marker.mirror_id}")
        with reported("cannot read the checkpoint", checkpoint.folder):
            num_bytes = sum(path.stat().st_size for path in copied_files(checkpoint))
        hint = f'It takes {num_bytes} bytes; for a folder with room, give init_info {{"stage_dir": "/path"}}.'
        try:
            with reported("cannot make the mirror", folder, hint):
                _clear(folder, num_bytes)
                work.mkdir()
                with locked(work):
                    copy_checkpoint(checkpoint, work)
                    for path in work.iterdir():
                        sync(path)
                    _check_state(Checkpoint(work), version, state_digest, "Was the checkpoint changed meanwhile?")
                    write_marker(work, marker)
                    work.rename(folder)
                    sync(folder.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return cls(folder)

    @staticmethod
    def remove(folder: Path) -> None:
        """Delete a mirror, be it damaged; no work if there is no such folder. What a death leaves, `create` clears.

        Raises:
            MirrorBusy: somebody uses it.
            StageError: the folder holds no mirror, or cannot be written.
        """
        if not folder.exists():
            return
        if not (folder / MIRROR_NAME).exists():
            raise StageError("the folder holds no mirror", file=str(folder), hint="If nobody needs it, delete it.")
        with reported("cannot delete the mirror", folder), locked(folder):
            hidden = folder.rename(folder.with_name(f".{folder.name}.{uuid.uuid4().hex}"))
            shutil.rmtree(hidden, ignore_errors=True)

    @property
    def run_id(self) -> str:
        """The run that it follows."""
        return self._marker.run_id

    @property
    def version(self) -> int:
        """The version that it is; while torn, the one that it came from."""
        return self._marker.version

    @property
    def state_digest(self) -> str:
        """The state digest of `version`."""
        return self._marker.state_digest

    @property
    def made_from(self) -> str:
        """The folder of the checkpoint that it was made from."""
        return self._marker.checkpoint

    @property
    def advancing_to(self) -> Target | None:
        """Where it is on its way to."""
        return self._marker.advancing_to

    @property
    def is_torn(self) -> bool:
        """Whether an `advance` has not ended: its process died, or is still at it."""
        return self.advancing_to is not None

    def bits(self, name: str) -> Bits:
        """Return all elements of a tensor, flat: a read-only view, which stands still only while there is a pin."""
        return self.checkpoint.bits(name)

    def advance(
        self, patches: Sequence[TensorPatch], *, version: int, state_digest: str, old_digests: Mapping[str, str]
    ) -> None:
        """Bring the weights to another version, later or earlier; no work if they are there already. Blocks.

        A torn mirror is finished, if it was on its way to the same version, and then read as a whole.

        Args:
            patches: one a changed tensor, of absolute values.
            version: the version that they lead to.
            state_digest: its state digest.
            old_digests: by tensor, the digest of the values before at the touched positions. Not used if torn.

        Raises:
            MirrorBusy: somebody reads or writes it; nothing was written.
            BaseMismatch: the weights are not those that the patches start from, or are torn on their way to another
                version; nothing was written.
            VerifyError: a torn mirror came out with another state, and stays torn.
            StageError: the disk failed; the mirror is what it was, or torn.
        """
        target = Target(version=version, state_digest=state_digest)
        with reported("cannot write the mirror", self.folder), locked(self.folder):
            self._refresh()
            if (journal := self.advancing_to) is not None:
                if journal != target:
                    raise self._mismatch("the mirror is torn on its way to another version", None, journal, target)
                self._check_specs(patches)
            elif (self.version, self.state_digest) == (version, state_digest):
                return
            else:
                self._check_specs(patches)
                self._check_old(patches, old_digests, state_digest)
                self._set(advancing_to=target)
            write_patches(self.checkpoint, self.folder, patches)
            if journal is not None:
                _check_state(self.checkpoint, version, state_digest, REBUILD)
            self._set(version=version, state_digest=state_digest, advancing_to=None)

    def pin(self, version: int) -> Pin:
        """Hold the mirror still at `version`, for a reader. Does not wait.

        Raises:
            NotStaged: it is at another version, torn, or being written.
            StageError, CorruptFile, UnsupportedFormat, ObjectNotFound: it is gone or damaged.
        """
        what, expected = "the mirror is not at the version asked for", f"version {version}"
        with reported("cannot read the mirror", self.folder):
            lock = try_lock_mirror(self.folder, shared=True)
            if lock is None:
                raise NotStaged(what, file=str(self.folder), expected=expected, found="it is being written")
            try:
                self._refresh()
                if self.is_torn or self.version != version:
                    found = f"version {self.version}"
                    found += f", torn on its way to version {self.advancing_to.version}" if self.advancing_to else ""
                    raise NotStaged(what, file=str(self.folder), expected=expected, found=found)
            except BaseException:
                lock.close()
                raise
            return Pin(lock)

    def _refresh(self) -> None:
        """Learn what others did, now that it is locked."""
        known, marker = self._marker, read_marker(self.folder)
        if marker.mirror_id != known.mirror_id:
            with damage_told():
                self.checkpoint = Checkpoint(self.folder)
        self._adopt(marker)

    def _set(self, **changes: object) -> None:
        marker = self._marker.model_copy(update=changes)
        write_marker(self.folder, marker)
        self._adopt(marker)

    def _adopt(self, marker: Marker) -> None:
        if marker != self._marker:
            self.checkpoint.__dict__.pop("state_digest", None)  # cached there, and no longer true
        self._marker = marker

    def _check_specs(self, patches: Sequence[TensorPatch]) -> None:
        for patch in patches:
            known = self.checkpoint.specs.get(patch.spec.name)
            if known != patch.spec:
                what = "the mirror has no such tensor"
                raise self._mismatch(what, patch.spec.name, patch.spec, known or "nothing of that name")

    def _check_old(self, patches: Sequence[TensorPatch], old_digests: Mapping[str, str], state_digest: str) -> None:
        """Compare what is about to be overwritten, and where that leads; in the time that the changes take."""
        state = int(self.state_digest, 16)
        for patch in patches:
            spec = patch.spec
            old = digest.patch_digest(spec, patch.positions, self.bits(spec.name)[patch.positions])
            if digest.format_digest(old) != old_digests.get(spec.name):
                what = "the mirror's weights are not the ones these patches start from"
                raise self._mismatch(what, spec.name, old_digests.get(spec.name), digest.format_digest(old))
            state = digest.add_digests(state, digest.patch_digest(spec, patch.positions, patch.values), -old)
        found = digest.format_digest(state)
        if found != state_digest:
            raise self._mismatch("the patches do not lead from the mirror to that state", None, state_digest, found)

    def _mismatch(self, what: str, tensor: str | None, expected: object, found: object) -> BaseMismatch:
        return BaseMismatch(what, file=str(self.folder), tensor=tensor, expected=expected, found=found, hint=REBUILD)


def _check_state(checkpoint: Checkpoint, version: int, expected: str, hint: str) -> None:
    # Not the cached one: the files change under their mapping.
    found = digest.format_digest(digest.state_digest(checkpoint.items()))
    if found != expected:
        raise VerifyError(
            f"the mirror does not come out as version {version}",
            file=str(checkpoint.folder),
            expected=f"state digest {expected}",
            found=f"state digest {found}",
            hint=hint,
        )


def _clear(folder: Path, num_bytes: int) -> None:
    """See that `folder` can be made: sweep what dead tries left, and look for room."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{32}}")
    for path in [path for path in folder.parent.iterdir() if hidden.fullmatch(path.name)]:
        lock = try_lock_mirror(path, shared=False)
        if lock is not None:
            with lock:
                shutil.rmtree(path, ignore_errors=True)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StageError("the mirror's folder is in use", file=str(folder), hint="If nobody needs it, delete it.")
    free = shutil.disk_usage(folder.parent).free
    if free < num_bytes:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {free} bytes are free", str(folder))
