# SPDX-License-Identifier: Apache-2.0
"""What a folder is, and which foreign deltas follow each other.

SkyRL numbers its deltas, and each says what it starts from; OpenRL's have no number, so the order in which they are
given is all there is. Payload is not read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path

from vllm_delta_snapshot.errors import BrokenChain, CorruptFile, ObjectNotFound, StoreUnavailable
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.interop.openrl import read_folder_metadata
from vllm_delta_snapshot.interop.skyrl_manifest import MANIFEST_NAME, SkyRLManifest, delta_version, read_manifest

__all__ = ["FolderKind", "ForeignChain", "ForeignDelta", "check_link", "find_chain", "kind_of", "list_skyrl_folders"]


class FolderKind(Enum):
    """What a folder is; the value is its name for people."""

    RUN = "run"
    DELTA = "delta"
    OPENRL = "OpenRL sparse_delta"
    SKYRL = "SkyRL delta"
    SKYRL_SYNC_DIR = "SkyRL sync_dir"


@dataclass(frozen=True, slots=True)
class ForeignDelta:
    """One delta of a chain.

    Attributes:
        folder: where it lies.
        kind: ``OPENRL`` or ``SKYRL``.
        version: the version that it leads to; ``None`` for OpenRL, which has none.
        base_version: the version that it must start from; ``None`` for OpenRL.
    """

    folder: Path
    kind: FolderKind
    version: int | None = None
    base_version: int | None = None

    def __str__(self) -> str:
        return self.folder.name if self.version is None else f"version {self.version}"


@dataclass(frozen=True, slots=True)
class ForeignChain:
    """Deltas in the order in which they apply; may be empty.

    Attributes:
        kind: ``OPENRL`` or ``SKYRL``, of all of them.
        base_version: the version that the first one starts from; ``None`` for OpenRL.
        deltas: the deltas.
    """

    kind: FolderKind
    base_version: int | None
    deltas: tuple[ForeignDelta, ...]

    @property
    def version(self) -> int | None:
        """The version that the chain leads to; ``None`` for OpenRL."""
        return self.deltas[-1].version if self.deltas else self.base_version


def kind_of(folder: Path) -> FolderKind | None:
    """Return what a local folder is; ``None`` if it is nothing that this project reads.

    Raises:
        CorruptFile, UnsupportedFormat, LimitExceeded: it has a metadata.json that cannot be read.
        StoreUnavailable: it cannot be listed.
    """
    if (folder / layout.METADATA_NAME).is_file():
        is_ours = isinstance(read_folder_metadata(folder), DeltaMetadata)
        return FolderKind.DELTA if is_ours else FolderKind.OPENRL
    if (folder / MANIFEST_NAME).is_file():
        return FolderKind.SKYRL
    if (folder / layout.RUN_KEY).is_file():
        return FolderKind.RUN
    return FolderKind.SKYRL_SYNC_DIR if any(_version_folders(folder)) else None


def list_skyrl_folders(sync_dir: Path) -> dict[int, Path]:
    """Return the folders of the committed versions in a SkyRL sync_dir, ascending: those that have a manifest.

    Raises:
        StoreUnavailable: it cannot be listed.
    """
    folders = sorted(_version_folders(sync_dir).items())
    return {version: folder for version, folder in folders if (folder / MANIFEST_NAME).is_file()}


def find_chain(folders: Sequence[Path], *, version: int | None = None) -> ForeignChain:
    """Return the chain that folders make.

    Args:
        folders: one SkyRL sync_dir; or SkyRL deltas, in order; or OpenRL deltas, in order.
        version: of a sync_dir, the version to lead to; by default the newest.

    Raises:
        BrokenChain: a version is missing, does not start from the one before it, or folders are of different kinds.
        CorruptFile: a delta of ours is among them.
        ObjectNotFound: a folder is no delta.
        UnsupportedFormat, LimitExceeded, StoreUnavailable: a description cannot be read.
    """
    kinds = [_foreign_kind(folder) for folder in folders]
    if kinds == [FolderKind.SKYRL_SYNC_DIR]:
        return _of_sync_dir(folders[0], version)
    if version is not None:
        raise BrokenChain(
            "a single delta has no versions to choose from",
            file=str(folders[-1]),
            found=f"version {version}",
            hint="Give the sync_dir and a version, or the folders of the deltas in order.",
        )
    if set(kinds) == {FolderKind.SKYRL}:
        return _of_skyrl(folders)
    if set(kinds) == {FolderKind.OPENRL}:
        return ForeignChain(FolderKind.OPENRL, None, tuple(ForeignDelta(f, FolderKind.OPENRL) for f in folders))
    raise BrokenChain(
        "these folders make no chain",
        file=str(folders[0]),
        expected="one SkyRL sync_dir, or deltas of one tool in order",
        found=", ".join(f"{folder.name}: {kind.value}" for folder, kind in zip(folders, kinds, strict=True)),
        hint="Give one sync_dir, or the folders of one tool's deltas in order.",
    )


def _foreign_kind(folder: Path) -> FolderKind:
    kind = kind_of(folder)
    if kind is None:
        raise ObjectNotFound(
            "no delta here",
            file=str(folder),
            hint="A SkyRL delta holds manifest.json, an OpenRL delta metadata.json, a SkyRL sync_dir delta-00000001.",
        )
    if kind in (FolderKind.RUN, FolderKind.DELTA):
        raise CorruptFile(
            f"this is a {kind.value} of ours, which is read as a whole run and in its order",
            file=str(folder),
            hint="Give the run's folder alone, as SYNC_DIR or SYNC_DIR@N.",
        )
    return kind


def _of_sync_dir(sync_dir: Path, version: int | None) -> ForeignChain:
    committed = list_skyrl_folders(sync_dir)
    newest = max(committed, default=0)
    wanted = range(1, (newest if version is None else version) + 1)
    missing = list(islice((number for number in wanted if number not in committed), 11))
    if missing:
        listed = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise BrokenChain(
            f"no way from the base checkpoint to version {wanted.stop - 1}",
            file=str(sync_dir),
            expected=f"versions 1 to {wanted.stop - 1}, each with a manifest.json",
            found=f"newest is {newest}, missing: {listed}",
            hint="With a checkpoint of a later version as base, give the folders of the deltas after it, in order.",
        )
    deltas = (ForeignDelta(committed[number], FolderKind.SKYRL, number, number - 1) for number in wanted)
    return ForeignChain(FolderKind.SKYRL, 0, tuple(deltas))


def _of_skyrl(folders: Sequence[Path]) -> ForeignChain:
    deltas: list[ForeignDelta] = []
    for folder in folders:
        manifest = read_manifest(folder)
        expected = deltas[-1].version if deltas else manifest.base_version
        deltas.append(ForeignDelta(folder, FolderKind.SKYRL, manifest.version, expected))
        check_link(deltas[-1], manifest)
    return ForeignChain(FolderKind.SKYRL, deltas[0].base_version, tuple(deltas))


def check_link(delta: ForeignDelta, manifest: SkyRLManifest) -> None:
    """Check that a SkyRL delta is the version that it is taken for, and starts where the one before it ends.

    Raises:
        BrokenChain: it is another version, or starts from another one.
    """
    expected, found = (delta.base_version, delta.version), (manifest.base_version, manifest.version)
    if found != expected:
        raise BrokenChain(
            f"{delta.folder.name} does not continue the chain",
            file=str(delta.folder / MANIFEST_NAME),
            expected=f"version {expected[1]} from base version {expected[0]}",
            found=f"version {found[1]} from base version {found[0]}",
            hint="Give all deltas, each once, in the order of their versions.",
        )


def _version_folders(sync_dir: Path) -> dict[int, Path]:
    try:
        names = [path.name for path in sync_dir.iterdir()] if sync_dir.is_dir() else []
    except OSError as error:
        raise StoreUnavailable("cannot be listed", file=str(sync_dir), found=error) from error
    found = ((delta_version(name), sync_dir / name) for name in names)
    return {version: folder for version, folder in found if version is not None}
