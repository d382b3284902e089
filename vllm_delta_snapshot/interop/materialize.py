# SPDX-License-Identifier: Apache-2.0
"""Materialize a foreign chain: base checkpoint + SkyRL's or OpenRL's deltas -> a plain Hugging Face folder.

The result appears under its name only when its state digest, recomputed from its bytes, is the base's moved by every
patch. What the patches are worth is another matter: SkyRL's are proven by checksums, OpenRL's have none (`verify`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.checkpoint.patch_files import copy_checkpoint, write_patches
from vllm_delta_snapshot.errors import VerifyError
from vllm_delta_snapshot.format.digest import add_digests, format_digest, patch_digest
from vllm_delta_snapshot.interop.chain import ForeignChain
from vllm_delta_snapshot.interop.replay import read_patches
from vllm_delta_snapshot.runs.materialize import PROVENANCE_NAME
from vllm_delta_snapshot.types import TensorPatch
from vllm_delta_snapshot.util.new_folder import new_folder

__all__ = ["ForeignMaterializeReport", "materialize_chain"]

Progress = Callable[[int, int], None]
"""Called with (deltas applied, deltas in all)."""


@dataclass(frozen=True, slots=True)
class ForeignMaterializeReport:
    """What was made; ``version`` is ``None`` for OpenRL, which has none."""

    folder: str
    kind: str
    version: int | None
    deltas: int
    state_digest: str
    changed_elements: int


def materialize_chain(
    chain: ForeignChain, base: Checkpoint, out: Path, *, progress: Progress | None = None
) -> ForeignMaterializeReport:
    """Write what a chain leads to into the new folder `out`. Blocks.

    Args:
        chain: the chain.
        base: the checkpoint that it starts from, local.
        out: must not exist, or be empty.
        progress: told after every delta.

    Raises:
        BrokenChain: a delta does not continue the one before it.
        CorruptFile, UnsupportedFormat, LimitExceeded, ObjectNotFound, StoreUnavailable: a delta cannot be read, does
            not fit `base`, or does not lead to what was published.
        VerifyError: the files do not hold what was written; nothing is left behind.
        StageError: `out` is in use or cannot be written.
    """
    with new_folder(out) as work:
        copy_checkpoint(base, work)
        writer = _Writer(base, work)
        for done, delta in enumerate(chain.deltas, start=1):
            writer.write(read_patches(delta, base.specs, writer.made.bits))
            if progress:
                progress(done, len(chain.deltas))
        digest = writer.checked_digest()
        report = ForeignMaterializeReport(
            str(out.resolve()), chain.kind.value, chain.version, len(chain.deltas), digest, writer.changed
        )
        _note(work, chain, digest)
    return report


class _Writer:
    """Writes patches into a copy of the base, and keeps count of what they should make of it."""

    def __init__(self, base: Checkpoint, work: Path) -> None:
        self.made = Checkpoint(work)  # mapped, so that it shows what is written
        self.changed = 0
        self._base = base
        self._work = work
        self._digest = int(base.state_digest, 16)

    def write(self, patches: Iterable[TensorPatch]) -> None:
        write_patches(self._base, self._work, self._counted(patches))

    def checked_digest(self) -> str:
        found, expected = Checkpoint(self._work).state_digest, format_digest(self._digest)
        if found != expected:
            raise VerifyError(
                "the checkpoint came out with other weights than the deltas make",
                file=str(self._work),
                expected=f"state digest {expected}",
                found=f"state digest {found}",
                hint="Check the disk, and that nothing else writes the base checkpoint; then try again.",
            )
        return found

    def _counted(self, patches: Iterable[TensorPatch]) -> Iterator[TensorPatch]:
        for patch in patches:
            old = self.made.bits(patch.spec.name)[patch.positions]
            before = patch_digest(patch.spec, patch.positions, old)
            after = patch_digest(patch.spec, patch.positions, patch.values)
            self._digest = add_digests(self._digest, after, -before)
            self.changed += patch.changed
            yield patch


def _note(work: Path, chain: ForeignChain, digest: str) -> None:
    names = [delta.folder.name for delta in chain.deltas]
    note = {"made_from": chain.kind.value, "version": chain.version, "deltas": names, "state_digest": digest}
    (work / PROVENANCE_NAME).write_text(json.dumps(note, indent=1) + "\n")
