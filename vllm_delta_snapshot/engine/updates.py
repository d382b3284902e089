# SPDX-License-Identifier: Apache-2.0
"""Where an engine's updates come from: staged by the run's stager, or an OpenRL folder. Ready to be prepared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_delta_snapshot.errors import BaseMismatch, CorruptFile, RunMismatch
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.format.openrl import read_folder_metadata, read_openrl_delta
from vllm_delta_snapshot.stage.decode import decode
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

__all__ = ["Update", "openrl_update", "staged_update"]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Patches, and what they lead to.

    Attributes:
        version: the version they lead to; ``None`` for an OpenRL folder.
        state_digest: the state they lead to; empty for an OpenRL folder.
        patches: one a changed tensor.
        old_digests: by name, the digest of the values they start from; empty for an OpenRL folder.
    """

    version: int | None
    state_digest: str
    patches: Sequence[TensorPatch]
    old_digests: Mapping[str, str]


def staged_update(
    folder: Path, specs: Mapping[str, TensorSpec], *, run_id: str, base_version: int, version: int, state_digest: str
) -> Update:
    """Read a staged update and check that it starts from what this engine has.

    Args:
        folder: where the stager put it.
        specs: the run's tensors.
        run_id: the engine's run.
        base_version: the engine's version.
        version: the version asked for.
        state_digest: the engine's state digest.

    Raises:
        RunMismatch: it is of another run.
        BaseMismatch: it starts from another version or state.
        CorruptFile: it is damaged.
    """
    metadata = read_folder_metadata(folder)
    if not isinstance(metadata, DeltaMetadata):
        raise CorruptFile("a staged update lost its lineage", file=str(folder))
    if metadata.run_id != run_id:
        raise RunMismatch("the update belongs to another run", file=str(folder), expected=run_id, found=metadata.run_id)
    expected = (base_version, state_digest, version)
    found = (metadata.base_version, metadata.base_state_digest, metadata.version)
    if found != expected:
        raise BaseMismatch(
            "the update does not start from the weights of this engine",
            file=str(folder),
            expected="version {} with state digest {}, to version {}".format(*expected),
            found="version {} with state digest {}, to version {}".format(*found),
        )
    old_digests = {entry.name: entry.old_digest for entry in metadata.tensors}
    return Update(version, metadata.state_digest, decode(metadata, folder, specs), old_digests)


def openrl_update(folder: Path, specs: Mapping[str, TensorSpec]) -> Update:
    """Read an OpenRL folder. It says nothing of what it starts from, so nothing of that is checked.

    Raises:
        CorruptFile, UnsupportedFormat, LimitExceeded, ObjectNotFound: see `read_openrl_delta`.
    """
    _, patches = read_openrl_delta(folder, specs)
    return Update(None, "", patches, {})
