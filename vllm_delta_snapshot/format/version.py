# SPDX-License-Identifier: Apache-2.0
"""The records that make a delta exist: versions/N.json, the commit of version N, and merged/M-N.json, a shortcut.

A record names the folder of the publication and the digest of its metadata.json, which names every file and its digest;
so this one small object pins every byte. A version exists from the moment its record does. A merged delta adds nothing:
it comes to the same as the versions that it spans.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, model_validator

from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.run import RunId
from vllm_delta_snapshot.format.wire import Count, Digest64, Digest128, PublicationId, WireModel

__all__ = ["MAX_VERSION_BYTES", "DeltaRecord", "MergedRecord", "VersionRecord"]

MAX_VERSION_BYTES: Final = 1 << 16
"""A reader refuses a larger record."""


class DeltaRecord(WireModel):
    """What both records say."""

    format: Literal["delta_snapshot_version"] = "delta_snapshot_version"
    format_version: Literal[1] = 1
    kind: Literal["delta", "merged"]
    run_id: RunId
    version: int = Field(ge=1, le=layout.MAX_VERSION)
    base_version: int = Field(ge=0, le=layout.MAX_VERSION)
    publication_id: PublicationId
    folder: str
    metadata_bytes: Count
    metadata_xxh3_128: Digest128
    payload_bytes: Count
    changed_elements: Count
    base_state_digest: Digest64
    state_digest: Digest64
    created_at: str


class VersionRecord(DeltaRecord):
    """The content of versions/N.json."""

    kind: Literal["delta"] = "delta"

    @model_validator(mode="after")
    def _check(self) -> VersionRecord:
        if layout.version_of_delta(self.folder) != self.version:
            raise ValueError(f"folder {self.folder!r} is not a folder of version {self.version}")
        if self.base_version >= self.version:
            raise ValueError(f"base version {self.base_version} is not before version {self.version}")
        return self


class MergedRecord(DeltaRecord):
    """The content of merged/M-N.json."""

    kind: Literal["merged"] = "merged"

    @model_validator(mode="after")
    def _check(self) -> MergedRecord:
        if layout.step_of_merged(self.folder) != (self.base_version, self.version):
            raise ValueError(f"folder {self.folder!r} is not one between {self.base_version} and {self.version}")
        if self.base_version > self.version - 2:
            raise ValueError(f"from {self.base_version} to {self.version} there is nothing to merge")
        return self
