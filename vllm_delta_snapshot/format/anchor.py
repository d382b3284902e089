# SPDX-License-Identifier: Apache-2.0
"""An anchor: a whole checkpoint at version N, in plain Hugging Face layout, from which a chain can begin anew.

::

    <sync_dir>/anchors/00000050.json             the record: created exclusively, last
    <sync_dir>/anchors/00000050-77b0e214/...     the checkpoint's files, and metadata.json, which names them

Like a merged delta it adds nothing: it is what the versions before it come to, proven by the version's state digest.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, model_validator

from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.metadata import FileEntry
from vllm_delta_snapshot.format.run import RunId
from vllm_delta_snapshot.format.wire import Count, Digest64, Digest128, PublicationId, WireModel

__all__ = ["MAX_ANCHOR_BYTES", "AnchorMetadata", "AnchorRecord", "PrunedMark"]

MAX_ANCHOR_BYTES: Final = 16 << 20
"""A reader refuses a larger metadata.json of an anchor: that many bytes name a hundred thousand files."""


class AnchorRecord(WireModel):
    """The content of anchors/N.json: the anchor exists from the moment this does."""

    format: Literal["delta_snapshot_anchor"] = "delta_snapshot_anchor"
    format_version: Literal[1] = 1
    run_id: RunId
    version: int = Field(ge=1, le=layout.MAX_VERSION)
    publication_id: PublicationId
    folder: str
    metadata_bytes: Count
    metadata_xxh3_128: Digest128
    payload_bytes: Count
    state_digest: Digest64
    created_at: str

    @model_validator(mode="after")
    def _check(self) -> AnchorRecord:
        if layout.version_of_anchor(self.folder) != self.version:
            raise ValueError(f"folder {self.folder!r} is not a folder of an anchor of version {self.version}")
        return self


class AnchorMetadata(WireModel):
    """The content of metadata.json in an anchor's folder."""

    format: Literal["delta_snapshot_anchor_files"] = "delta_snapshot_anchor_files"
    format_version: Literal[1] = 1
    run_id: RunId
    version: int = Field(ge=1, le=layout.MAX_VERSION)
    publication_id: PublicationId
    state_digest: Digest64
    files: tuple[FileEntry, ...]
    created_at: str
    writer: str

    @model_validator(mode="after")
    def _check(self) -> AnchorMetadata:
        names = [entry.name for entry in self.files]
        if len(set(names)) != len(names):
            raise ValueError("a file is named twice")
        return self


class PrunedMark(WireModel):
    """The content of pruned/N.json: the files of deltas up to and including version N are gone, or about to go.

    It is created before anything is deleted, and the highest number holds. The records of those versions stay: they
    keep a number from being used twice, and the lineage readable.
    """

    format: Literal["delta_snapshot_pruned"] = "delta_snapshot_pruned"
    format_version: Literal[1] = 1
    run_id: RunId
    version: int = Field(ge=1, le=layout.MAX_VERSION)
    created_at: str
