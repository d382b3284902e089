# SPDX-License-Identifier: Apache-2.0
"""The deltas that a stager has at hand: fetched, verified, and linked to the state that they start from.

Most are a version's own. Where engines are far behind there are merged deltas too, and a jump to an anchor, which is
made here. Kept until `forget`, within a limit of disk; what is not there any more is fetched again when it is needed
again. Of decoded changes only the newest are kept, within a limit of memory: the rest is decoded again.
"""

from __future__ import annotations

import logging
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from vllm_delta_snapshot.changes.decode import decode, naming
from vllm_delta_snapshot.changes.merge import FOLD_CHANGES
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import BaseMismatch, DeltaSnapshotError, OutOfOrder
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.anchor import AnchorRecord
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.format.version import DeltaRecord
from vllm_delta_snapshot.host.area import StageArea
from vllm_delta_snapshot.host.jump import write_jump
from vllm_delta_snapshot.runs.chain import Step, known_way
from vllm_delta_snapshot.runs.fetch import fetch
from vllm_delta_snapshot.runs.replay import plan_run
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.types import Change

__all__ = ["FetchedVersions"]

logger = logging.getLogger(__name__)


class FetchedVersions:
    """See the module.

    Args:
        folder: the run.
        area: where files are kept.
        checkpoint: the engines' checkpoint.
        start: the version that it is.
        cache_bytes: how many bytes of files may be kept; those of the newest delta are, whatever their size.
        kept_changes: how many decoded changes may be kept; those of the newest delta are, however many.
    """

    def __init__(
        self,
        folder: RunFolder,
        area: StageArea,
        checkpoint: Checkpoint,
        start: int,
        *,
        cache_bytes: int = 1 << 40,
        kept_changes: int = FOLD_CHANGES,
    ) -> None:
        self._folder = folder
        self._area = area
        self._checkpoint = checkpoint
        self._start = start
        self._cache_bytes = cache_bytes
        self._kept_changes = kept_changes
        self._records: dict[Step, DeltaRecord] = {}
        self._metadata: dict[Step, DeltaMetadata] = {}
        self._decoded: dict[Step, list[Change]] = {}
        self._anchors: dict[Step, AnchorRecord] = {}
        self._digests: dict[int, str] = {}

    def __contains__(self, version: object) -> bool:
        """Say whether a version's own delta was verified, and not forgotten since."""
        return isinstance(version, int) and (version - 1, version) in self._metadata

    def way(self, base: int, version: int) -> list[Step]:
        """Return deltas that lead from one version to a later one: those at hand, else the cheapest in the store.

        Raises:
            OutOfOrder: it begins before the engines' checkpoint.
            BrokenChain: there is none.
            CorruptFile, UnsupportedFormat, StoreUnavailable: a record cannot be read.
        """
        if base < self._start:
            raise OutOfOrder(
                "nothing is known of versions before the engine's checkpoint",
                file=str(self._checkpoint.folder),
                expected=f"version {self._start} or later",
                found=f"version {base}",
                hint="Ask for that version or a later one; or start the engine from an earlier checkpoint.",
            )
        known = known_way(self._metadata, base, version)
        if known is not None:
            return known
        is_start = base == self._start
        if version == base + 1 and not is_start:
            return [(base, version)]
        plan = plan_run(self._folder, version, start=(base, self.state_digest(base)), may_jump=is_start)
        steps = [(step.base_version, step.version) for step in plan.chain.steps]
        if plan.anchor is not None:
            steps.insert(0, (base, plan.anchor.version))
            self._anchors[steps[0]] = plan.anchor
        return steps

    def is_own(self, base: int, version: int) -> bool:
        """Say whether a version's own delta leads from `base` to it. Raises: see `way`."""
        step = (base, version)
        return version == base + 1 and self.way(base, version) == [step] and step not in self._anchors

    def load(self, version: int) -> None:
        """Have a version's own delta verified. Raises: see `load_step`."""
        self.load_step((version - 1, version))

    def load_step(self, step: Step) -> None:
        """Have a delta verified. Blocks if it has to be fetched, or made.

        Raises:
            BaseMismatch: it does not start from the state that its base version is, or not lead to its version's.
            BrokenChain, CorruptFile, UnsupportedFormat, StageError, StoreUnavailable: it cannot be had.
        """
        if step in self._metadata:
            return
        base, version = step
        if step in self._anchors:
            metadata = self._jump(step)
        else:
            record = self._folder.read_delta(base, version)
            metadata = self._folder.read_metadata(record)
            self._check(step, metadata)
            fetch(self._folder.store, record, metadata, self._area.fetched_folder(*step))
            self._records[step] = record
            logger.info("fetched version=%d base=%d bytes=%d", version, base, record.payload_bytes)
        self._keep(step, self._decode(step, metadata, self._area.fetched_folder(*step)))
        self._metadata[step] = metadata
        self._digests[version] = metadata.state_digest
        self._trim(step)

    def each(self, first: int, last: int) -> Iterator[list[Change]]:
        """Yield the changes of deltas that come to the versions from `first` to `last`, each when it is asked for.

        Raises: see `way` and `load_step`.
        """
        yield from map(self.step_changes, self.way(first - 1, last))

    def read_metadata(self, step: Step) -> DeltaMetadata:
        """Return a delta's metadata, checked; its payload is fetched only if it is a jump. Raises: see `load_step`."""
        if step in self._metadata:
            return self._metadata[step]
        if step in self._anchors:
            self.load_step(step)
            return self._metadata[step]
        metadata = self._folder.read_metadata(self._folder.read_delta(*step))
        self._check(step, metadata)
        return metadata

    def metadata(self, version: int) -> DeltaMetadata:
        """Return the metadata of a version's own delta, or of any that leads there. Raises: see `load_step`."""
        leading = [step for step in self._metadata if step[1] == version]
        return self.read_metadata(max(leading, default=(version - 1, version)))

    def files(self, version: int) -> Path:
        """Return the folder with the files of a version's own delta, all there and intact. Raises: see `load_step`."""
        return self._files((version - 1, version))

    def changes(self, version: int) -> list[Change]:
        """Return the changes of a version's own delta. Raises: see `load_step`."""
        return self.step_changes((version - 1, version))

    def step_changes(self, step: Step) -> list[Change]:
        """Return a delta's changes; decoded again, if it is not one of the newest. Raises: see `load_step`."""
        self.load_step(step)
        if step not in self._decoded:
            decoded = self._decode(step, self._metadata[step], self._files(step))
            self._trim(step)
            if self._decoded and _order(step) < max(map(_order, self._decoded)):
                return decoded
            self._keep(step, decoded)
            return decoded
        return self._decoded[step]

    def state_digest(self, version: int) -> str:
        """Return the state digest of any version, at hand or not. Raises: as reading its record does."""
        if version == self._start:
            return self._checkpoint.state_digest
        if version not in self._digests:
            self._digests[version] = self._folder.read_version(version).state_digest
        return self._digests[version]

    def forget(self, oldest: int) -> None:
        """Forget deltas to versions up to and including `oldest`, and delete their files."""
        for step in [step for step in self._metadata if step[1] <= oldest]:
            del self._metadata[step]
            self._records.pop(step, None)
            self._decoded.pop(step, None)
        self._digests = {version: digest for version, digest in self._digests.items() if version >= oldest}
        for (_, version), path in self._folders():
            if version <= oldest:
                shutil.rmtree(path, ignore_errors=True)

    def _decode(self, step: Step, metadata: DeltaMetadata, local: Path) -> list[Change]:
        if step not in self._records:  # a jump, made here
            return decode(metadata, local, self._checkpoint.specs)
        with naming(local, self._folder.store.uri, self._records[step].folder):
            return decode(metadata, local, self._checkpoint.specs)

    def _jump(self, step: Step) -> DeltaMetadata:
        """Make the delta to an anchor; and if that cannot be had, forget it, so that another way is looked for."""
        try:
            folder = self._area.fetched_folder(*step)
            metadata = write_jump(self._folder, self._anchors[step], self._checkpoint, step[0], folder)
            self._check(step, metadata)
        except DeltaSnapshotError:
            self._metadata.pop(step, None)
            del self._anchors[step]
            raise
        logger.info("jumped base=%d version=%d changed=%d", *step, metadata.changed_elements)
        return metadata

    def _check(self, step: Step, metadata: DeltaMetadata) -> None:
        """Compare where a delta starts and ends with what its versions are."""
        base, version = step
        at = self.state_digest(base)
        if (metadata.base_version, metadata.base_state_digest) != (base, at):
            raise BaseMismatch(
                f"version {version} does not continue version {base}",
                file=self._where(step),
                hint=self._hint(),
                expected=f"base version {base} with state digest {at}",
                found=f"base version {metadata.base_version} with state digest {metadata.base_state_digest}",
            )
        if base < version - 1 and metadata.state_digest != (leads_to := self.state_digest(version)):
            raise BaseMismatch(
                f"the delta from version {base} to {version} leads elsewhere",
                file=self._where(step),
                hint=self._hint(),
                expected=f"state digest {leads_to}",
                found=f"state digest {metadata.state_digest}",
            )

    def _where(self, step: Step) -> str:
        base, version = step
        key = layout.version_key(version) if version == base + 1 else layout.merged_key(base, version)
        return f"{self._folder.store.uri}/{key}"

    def _hint(self) -> str:
        return f"See which of them is wrong: delta-snapshot verify {shlex.quote(self._folder.store.uri)}"

    def _files(self, step: Step) -> Path:
        self.load_step(step)
        folder = self._area.fetched_folder(*step)
        if step in self._records:
            fetch(self._folder.store, self._records[step], self._metadata[step], folder)
        else:
            self._jump(step)
        return folder

    def _keep(self, step: Step, changes: list[Change]) -> None:
        self._decoded[step] = changes
        total = sum(change.changed for kept in self._decoded.values() for change in kept)
        for oldest in sorted(self._decoded, key=_order)[:-1]:
            if total <= self._kept_changes:
                break
            total -= sum(change.changed for change in self._decoded.pop(oldest))

    def _trim(self, needed: Step) -> None:
        """Delete the oldest files while there are more than may be kept; those of one delta stay."""
        folders = self._folders()
        sizes = {step: sum(file.stat().st_size for file in path.iterdir()) for step, path in folders}
        total = sum(sizes.values())
        for step, path in folders:
            if total <= self._cache_bytes:
                break
            if step != needed:
                total -= sizes[step]
                shutil.rmtree(path, ignore_errors=True)

    def _folders(self) -> list[tuple[Step, Path]]:
        """Return the folders of files, the oldest version first."""
        found = [(step, path) for path in self._area.fetched.iterdir() if (step := self._area.step_of(path))]
        return sorted(found, key=lambda pair: _order(pair[0]))


def _order(step: Step) -> Step:
    return step[1], step[0]
