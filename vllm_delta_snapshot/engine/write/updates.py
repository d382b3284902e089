# SPDX-License-Identifier: Apache-2.0
"""Where an engine's updates come from: staged by the run's stager, or an OpenRL folder. Ready to be prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_delta_snapshot.changes.decode import decode
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.engine.messages import DeltaSnapshotUpdateInfo
from vllm_delta_snapshot.engine.write.fitness import Fitness
from vllm_delta_snapshot.errors import ApplyError, BaseMismatch, CorruptFile, OutOfOrder, RunMismatch
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.host.handoff import Handoff, StagedUpdate
from vllm_delta_snapshot.host.mapping import Lane, map_update, read_lanes
from vllm_delta_snapshot.host.mirror import Mirror
from vllm_delta_snapshot.host.places import PlaceMap
from vllm_delta_snapshot.interop.openrl import read_folder_metadata, read_openrl_delta
from vllm_delta_snapshot.types import Change, TensorSpec

__all__ = ["Update", "Weights", "find_staged", "find_update", "openrl_update", "staged_update"]

_STAGED_ANEW: Final = (
    "Delete the stage folder of this host (`stage_dir`) and restart its engines: all of it is made anew."
)


@dataclass(frozen=True, slots=True)
class Weights:
    """Which weights an engine has: a version of a run, and its state digest."""

    run_id: str
    version: int
    state_digest: str


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Patches as one worker needs them, and what they lead to.

    Attributes:
        version: the version they lead to; ``None`` for an OpenRL folder.
        state_digest: the state they lead to; empty for an OpenRL folder.
        changed: by name, how many elements of each tensor change in the whole engine.
        old_digests: by name, the digest of the values they start from, ``None`` where it is not known; empty for an
            OpenRL folder.
        moves: by name, how far the digest of the tensor moves; empty if all values are absolute.
        lanes: what this worker writes.
        patches: reads the patches themselves, in checkpoint coordinates.
        mirror: the checkpoint at the version they lead to, held still; if there is one.
    """

    version: int | None
    state_digest: str
    changed: Mapping[str, int]
    old_digests: Mapping[str, str | None]
    moves: Mapping[str, str]
    lanes: Sequence[Lane]
    patches: Callable[[], Sequence[Change]]
    mirror: Mirror | None = None

    def mirror_bits(self, name: str) -> Bits:
        """Return all elements of a tensor at the version that this leads to.

        Raises:
            ApplyError: there is no mirror, or it is not held at that version.
        """
        if self.mirror is None or self.mirror.is_torn or self.mirror.version != self.version:
            raise ApplyError(
                "the mirror is not at the version of the update, so layers cannot be reloaded",
                tensor=name,
                expected=f"version {self.version}",
                found="no mirror" if self.mirror is None else f"version {self.mirror.version}",
                hint="Ask again.",
            )
        return self.mirror.bits(name)


def find_update(
    info: DeltaSnapshotUpdateInfo, handoff: Handoff | None, at: Weights, fitness: Fitness, *, stage_timeout_s: float
) -> Update | None:
    """Return the update that was asked for; ``None`` if the engine has that version already.

    Args:
        info: what was asked for.
        handoff: the worker's tie to its stager; ``None`` for an engine without a run.
        at: which version the weights are.
        fitness: where they lie.
        stage_timeout_s: how long `apply` waits for the version to be staged, unless `info` says; nothing else waits.

    Raises:
        NotStaged: it is not there.
        OutOfOrder: it is an earlier version, and nobody said that it is meant.
        DeltaSnapshotError: it cannot be had.
    """
    if info.target_weights_path is not None:
        return _find_openrl(Path(info.target_weights_path), handoff, fitness)
    if info.version == at.version and handoff is not None:
        return None
    timeout_s = stage_timeout_s if info.timeout_s is None else info.timeout_s
    staged, version = find_staged(info, handoff, at, timeout_s=timeout_s if info.action == "apply" else 0.0)
    return staged_update(
        staged,
        fitness.specs,
        run_id=at.run_id,
        base_version=at.version,
        version=version,
        state_digest=at.state_digest,
        leads_to=info.digest,
    )


def find_staged(
    info: DeltaSnapshotUpdateInfo, handoff: Handoff | None, at: Weights, *, timeout_s: float = 0.0
) -> tuple[StagedUpdate, int]:
    """Return where the update to another version lies, and the version. Opens none of its files.

    Args:
        info: which version.
        handoff: the worker's tie to its stager; ``None`` for an engine without a run.
        at: which version the weights are.
        timeout_s: how long to wait for it.

    Raises: see `find_update`.
    """
    version = info.version
    if handoff is None or version is None:
        raise RunMismatch(
            "this engine follows no run, so it knows no versions",
            found=f"version {version}",
            hint='Give init_info a sync_dir, or update_info {"target_weights_path": folder}.',
        )
    if version < at.version:
        check_rollback(at.version, version, handoff.oldest_version, is_meant=info.allow_rollback)
    return handoff.wait(at.version, version, timeout_s=timeout_s), version


def _find_openrl(folder: Path, handoff: Handoff | None, fitness: Fitness) -> Update:
    if handoff is not None:
        raise RunMismatch(
            "this engine follows a run; a folder without lineage would take it off the chain",
            file=str(folder),
            hint="Initialize the engine without a sync_dir to apply OpenRL folders.",
        )
    return openrl_update(folder, fitness.specs, fitness.plan.places)


def staged_update(
    staged: StagedUpdate,
    specs: Mapping[str, TensorSpec],
    *,
    run_id: str,
    base_version: int,
    version: int,
    state_digest: str,
    leads_to: str | None = None,
) -> Update:
    """Read a staged update and check that it starts from what this engine has, and leads to what was asked for.

    Args:
        staged: where the stager put it.
        specs: the run's tensors.
        run_id: the engine's run.
        base_version: the engine's version.
        version: the version asked for.
        state_digest: the engine's state digest.
        leads_to: the state digest of the version, where whoever asks knows it.

    Raises:
        RunMismatch: it is of another run, or the run's version is another than the one that was staged.
        BaseMismatch: it starts from another version or state.
        CorruptFile: it is damaged.
    """
    lanes, head = read_lanes(staged.mapped)
    fields: Any = head
    file = str(staged.mapped)
    if fields["run_id"] != run_id:
        raise RunMismatch(
            "the update belongs to another run", file=file, expected=run_id, found=fields["run_id"], hint=_STAGED_ANEW
        )
    expected = (base_version, state_digest, version)
    found = (fields["base_version"], fields["base_state_digest"], fields["version"])
    if found != expected:
        raise BaseMismatch(
            "the update does not start from the weights of this engine",
            file=file,
            expected="version {} with state digest {}, to version {}".format(*expected),
            found="version {} with state digest {}, to version {}".format(*found),
            hint=_STAGED_ANEW,
        )
    if leads_to is not None and fields["state_digest"] != leads_to:
        raise RunMismatch(
            f"another version {version} was staged than the one that is asked for",
            file=file,
            expected=f"state digest {leads_to}",
            found=f"state digest {fields['state_digest']}",
            hint="The run's folder was replaced by a copy that went another way. Restart the engine.",
        )
    return Update(
        version,
        fields["state_digest"],
        {name: changed for name, changed, _, _ in fields["tensors"]},
        {name: digest for name, _, digest, _ in fields["tensors"]},
        {name: move for name, _, _, move in fields["tensors"]} if fields["has_differences"] else {},
        lanes,
        lambda: _decode(staged.patches, specs),
        staged.mirror,
    )


def openrl_update(folder: Path, specs: Mapping[str, TensorSpec], places: PlaceMap) -> Update:
    """Read an OpenRL folder and map it. It says nothing of what it starts from, so nothing of that is checked.

    Raises:
        CorruptFile, UnsupportedFormat, LimitExceeded, ObjectNotFound: see `read_openrl_delta`.
        ApplyError: see `map_update`.
    """
    _, patches = read_openrl_delta(folder, specs)
    changed = {patch.spec.name: patch.changed for patch in patches}
    return Update(None, "", changed, {}, {}, map_update(patches, places), lambda: patches)


def check_rollback(at: int, version: int, oldest: int, *, is_meant: bool) -> None:
    """Check that going back to an earlier version is meant, and possible.

    Args:
        at: the engine's version.
        version: an earlier one.
        oldest: the earliest that can be reached.
        is_meant: whether the caller said so.

    Raises:
        OutOfOrder: it is not.
    """
    if not is_meant:
        raise OutOfOrder(
            "the engine is past that version",
            expected=f"version {at} or later",
            found=f"version {version}",
            hint='To go back on purpose, say so: update_info {"version": N, "allow_rollback": true}.',
        )
    if version < oldest:
        raise OutOfOrder(
            "the engine cannot go back to before its checkpoint",
            expected=f"version {oldest} or later",
            found=f"version {version}",
            hint="Start an engine from that version: delta-snapshot materialize <sync_dir>@N <folder>",
        )


def _decode(folder: Path, specs: Mapping[str, TensorSpec]) -> Sequence[Change]:
    metadata = read_folder_metadata(folder)
    if not isinstance(metadata, DeltaMetadata):
        raise CorruptFile("a staged update lost its lineage", file=str(folder))
    return decode(metadata, folder, specs)
