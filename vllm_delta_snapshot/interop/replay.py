# SPDX-License-Identifier: Apache-2.0
"""Replay a foreign chain: each delta's patches against the state before it, and all of them merged.

SkyRL's deltas are XORs, so whoever replays them keeps a state: `Overlay` in memory, or a copy of the checkpoint on disk
(`materialize`). OpenRL's hold absolute values and need none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from vllm_delta_snapshot.changes.merge import merge
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import ObjectNotFound, StoreUnavailable
from vllm_delta_snapshot.format.metadata import OpenRLMetadata
from vllm_delta_snapshot.interop.chain import FolderKind, ForeignChain, ForeignDelta, check_link
from vllm_delta_snapshot.interop.openrl import read_openrl_delta
from vllm_delta_snapshot.interop.skyrl import SkyRLDelta, open_skyrl_delta
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

__all__ = ["Overlay", "merge_chain", "open_linked", "read_openrl", "read_patches"]

BitsOf = Callable[[str], Bits]
"""Returns all elements of a tensor, by name."""


class Overlay:
    """A checkpoint and what was written over it. A tensor is copied into memory when it is first written.

    Args:
        base: the checkpoint, mapped; never written.
    """

    def __init__(self, base: Checkpoint) -> None:
        self._base = base
        self._written: dict[str, Bits] = {}

    def bits(self, name: str) -> Bits:
        """Return all elements of a tensor, flat, as they are now. The caller must not write."""
        written = self._written.get(name)
        return self._base.bits(name) if written is None else written

    def write(self, patch: TensorPatch) -> None:
        """Write the new values of one tensor."""
        name = patch.spec.name
        if patch.changed and name not in self._written:
            self._written[name] = np.array(self._base.bits(name))
        if patch.changed:
            self._written[name][patch.positions] = patch.values


def open_linked(delta: ForeignDelta, specs: Mapping[str, TensorSpec]) -> SkyRLDelta:
    """Open a SkyRL delta of a chain.

    Raises:
        BrokenChain: it is not the version that it is taken for, or starts from another one.
        CorruptFile, UnsupportedFormat, LimitExceeded, ObjectNotFound, StoreUnavailable: see `open_skyrl_delta`.
    """
    opened = open_skyrl_delta(delta.folder, specs)
    check_link(delta, opened.manifest)
    return opened


def read_patches(delta: ForeignDelta, specs: Mapping[str, TensorSpec], bits: BitsOf) -> Iterator[TensorPatch]:
    """Yield the patches of one delta, every one checked before it is yielded.

    Args:
        delta: the delta.
        specs: the tensors of the checkpoint.
        bits: returns all elements of a tensor before the delta; not asked by OpenRL's. A tensor may be written as soon
            as its patch was yielded.

    Raises:
        BrokenChain, CorruptFile, UnsupportedFormat, LimitExceeded, ObjectNotFound, StoreUnavailable: it cannot be read,
            or does not lead to what was published.
    """
    if delta.kind is FolderKind.OPENRL:
        yield from read_openrl(delta, specs)[1]
    else:
        yield from open_linked(delta, specs).patches(bits)


def read_openrl(delta: ForeignDelta, specs: Mapping[str, TensorSpec]) -> tuple[OpenRLMetadata, list[TensorPatch]]:
    """Read an OpenRL delta of a chain.

    Raises:
        CorruptFile, UnsupportedFormat, LimitExceeded, ObjectNotFound: see `read_openrl_delta`.
        StoreUnavailable: a file cannot be read.
    """
    try:
        return read_openrl_delta(delta.folder, specs)
    except ObjectNotFound:
        raise
    except OSError as error:
        raise StoreUnavailable("cannot be read", file=str(delta.folder), found=error) from error


def merge_chain(chain: ForeignChain, base: Checkpoint, *, after: int | None = None) -> list[TensorPatch]:
    """Return what a chain changes, one patch a tensor. Blocks; keeps the touched tensors in memory.

    Args:
        chain: the chain.
        base: the checkpoint that it starts from.
        after: of a SkyRL chain, the version after which deltas are merged; those up to it are only gone through. By
            default all are merged.

    Returns:
        The patches, in order of first appearance. Applying them equals applying the deltas one by one.

    Raises:
        BrokenChain, CorruptFile, UnsupportedFormat, LimitExceeded, ObjectNotFound, StoreUnavailable: see
            `read_patches`.
    """
    overlay = Overlay(base)

    def steps() -> Iterable[list[TensorPatch]]:
        for delta in chain.deltas:
            patches = []
            for patch in read_patches(delta, base.specs, overlay.bits):
                overlay.write(patch)
                patches.append(patch)
            if after is None or delta.version is None or delta.version > after:
                yield patches

    return [change for change in merge(steps()) if isinstance(change, TensorPatch)]
