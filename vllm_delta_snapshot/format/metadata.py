# SPDX-License-Identifier: Apache-2.0
"""metadata.json of a delta: OpenRL's sparse_delta fields, and beside them what makes a delta safe.

Two models. `DeltaMetadata` is what this project writes: every field known, nothing else accepted. `OpenRLMetadata`
is what OpenRL writes: its own fields are checked, other fields ignored, and nothing is known about run or lineage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import Annotated, Any, Final, Literal, Self

from pydantic import ConfigDict, FailFast, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from vllm_delta_snapshot.errors import UnsupportedFormat
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.digest import format_digest
from vllm_delta_snapshot.format.run import RunId
from vllm_delta_snapshot.format.wire import (
    Count,
    Digest64,
    Digest128,
    PublicationId,
    SpecEntry,
    WireModel,
    parse_json,
)

__all__ = [
    "MAX_METADATA_BYTES",
    "MAX_PARTS",
    "PARTS_VERSION",
    "DeltaMetadata",
    "FileEntry",
    "OpenRLMetadata",
    "TensorEntry",
    "Timings",
    "parse_metadata",
]

MAX_METADATA_BYTES: Final = 90 << 20
"""A reader refuses a larger metadata.json: 300 000 changed tensors take about 90 MB."""

MAX_PARTS: Final = 1 << 16
"""A reader refuses a tensor whose change comes in more parts."""

PARTS_VERSION: Final = 4
"""The format version in which a tensor's change may come in parts, from trainers that each hold a part of it."""

LAYER_NAMES_KEY: Final = "layer_names"
"""The key in the safetensors header under which OpenRL repeats the names, as JSON."""


class FileEntry(WireModel):
    """One payload file of a publication."""

    name: Annotated[str, Field(max_length=200)]
    bytes: Count
    xxh3_128: Digest128


class TensorEntry(SpecEntry):
    """One changed tensor, or a part of one: where it lies, and the digests of the touched elements before and after.

    Where several versions were merged without their values, only the digests' difference is known: ``old_digest`` is
    null, and ``new_digest`` says by how much the delta moves the tensor's digest.
    """

    changed: Count
    encoding: str
    file: Count
    block: Count | None = None
    old_digest: Digest64 | None
    new_digest: Digest64

    @property
    def moves_digest(self) -> int:
        """By how much the delta moves the digest of the tensor, modulo 2**64."""
        return int(self.new_digest, 16) - int(self.old_digest or "0", 16)

    @model_serializer(mode="wrap")
    def _without_block(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Before version 4, a tensor that shares its block with none says nothing of blocks.
        fields: dict[str, Any] = handler(self)
        if self.block is None:
            del fields["block"]
        return fields


class Timings(WireModel):
    """Seconds the writer spent, known when metadata.json is written."""

    diff_s: float = Field(ge=0)
    upload_s: float = Field(ge=0)


class _SparseDelta(WireModel):
    """The fields that OpenRL's reader knows."""

    format: Literal["sparse_delta"] = "sparse_delta"
    format_version: Literal[2, 3, 4] = 2
    kind: str = "sampler"
    base_model: str | None = None
    model_id: str | None = None
    created_at: str
    timestamp: float
    changed_elements: Count
    total_elements: Count
    density_pct: float
    layer_names: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...], FailFast()]
    layer_shapes: Annotated[tuple[Annotated[tuple[Count, ...], FailFast()], ...], FailFast()]

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if len(self.layer_names) != len(self.layer_shapes):
            raise ValueError(f"{len(self.layer_names)} layer_names but {len(self.layer_shapes)} layer_shapes")
        names = self.layer_names
        if self.format_version >= PARTS_VERSION:
            names = tuple(name for name, _ in groupby(names))  # parts of one tensor stand together
        if len(set(names)) != len(names):
            raise ValueError("a name appears twice in layer_names")
        return self


class DeltaMetadata(_SparseDelta):
    """A delta of this project: a single version, or several merged (then ``base_version < version - 1``)."""

    run_id: RunId
    publication_id: PublicationId
    version: int = Field(ge=0, le=layout.MAX_VERSION)
    base_version: int = Field(ge=0, le=layout.MAX_VERSION)
    base_state_digest: Digest64
    state_digest: Digest64
    files: Annotated[tuple[FileEntry, ...], FailFast()]
    tensors: Annotated[tuple[TensorEntry, ...], FailFast()]
    step: int | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    timings: Timings
    writer: str

    @model_validator(mode="after")
    def _check_tensors(self) -> Self:
        # A stager also writes updates that go back, to version 0 at last; what is published never does, as its version
        # record enforces.
        if self.base_version == self.version:
            raise ValueError(f"base version {self.base_version} is not before version {self.version}")
        if tuple(t.name for t in self.tensors) != self.layer_names:
            raise ValueError("tensors and layer_names differ")
        if tuple(t.shape for t in self.tensors) != self.layer_shapes:
            raise ValueError("tensors and layer_shapes differ")
        if sum(t.changed for t in self.tensors) != self.changed_elements:
            raise ValueError("changed_elements is not the sum over tensors")
        if any(t.file >= len(self.files) for t in self.tensors):
            raise ValueError("a tensor names a file that is not listed")
        if self.format_version == 2 and (len(self.files) != 1 or any(t.encoding != "raw" for t in self.tensors)):
            raise ValueError("format_version 2 has exactly one file, and the encoding raw")
        self._check_blocks()
        self._check_parts()
        return self

    def _check_blocks(self) -> None:
        if self.format_version >= PARTS_VERSION:
            if any(t.block is None for t in self.tensors):
                raise ValueError("a tensor does not say in which block it is")
            return
        known: set[int] = set()
        for place, block in enumerate(t.block for t in self.tensors):
            if block is not None and block not in known and block != place:
                raise ValueError("a block does not have the number of its first tensor")
            known.add(place if block is None else block)

    def _check_parts(self) -> None:
        for first, second in pairwise(self.tensors):
            if first.name == second.name and (first.shape, first.dtype) != (second.shape, second.dtype):
                raise ValueError(f"parts of {first.name} differ in shape or type")
        for name, parts in groupby(self.tensors, key=lambda t: t.name):
            count = sum(1 for _ in parts)
            if count > MAX_PARTS:
                raise ValueError(f"{name} comes in {count} parts; at most {MAX_PARTS} are read")

    @cached_property
    def by_tensor(self) -> tuple[TensorEntry, ...]:
        """One entry for every changed tensor: that of its change once its parts are joined.

        Counts and digests are the sums of the parts'; ``encoding``, ``file`` and ``block`` are the first part's.
        """
        return tuple(_joined(tuple(parts)) for _, parts in groupby(self.tensors, key=lambda t: t.name))


def _joined(parts: Sequence[TensorEntry]) -> TensorEntry:
    if len(parts) == 1:
        return parts[0]
    # The digest of elements is a sum over them. Where one is not known, what is left is by how much they move it.
    is_known = all(part.old_digest is not None for part in parts)
    old = sum(int(part.old_digest or "0", 16) for part in parts) if is_known else 0
    new = old + sum(part.moves_digest for part in parts)
    return parts[0].model_copy(
        update={
            "changed": sum(part.changed for part in parts),
            "old_digest": format_digest(old) if is_known else None,
            "new_digest": format_digest(new),
        }
    )


class OpenRLMetadata(_SparseDelta):
    """A delta that OpenRL wrote. Fields beside the ones above are ignored, as its own reader does."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    format_version: Literal[2] = 2
    created_at: str = ""
    timestamp: float = 0.0
    changed_elements: Count = 0
    total_elements: Count = 0
    density_pct: float = 0.0


def parse_metadata(data: bytes, *, file: str) -> DeltaMetadata | OpenRLMetadata:
    """Parse a metadata.json of either writer.

    A ``run_id`` tells ours from OpenRL's.

    Raises:
        UnsupportedFormat: another format, or a version that this reader does not know.
        CorruptFile: not JSON, or a field is missing or wrong.
    """
    fields: dict[str, Any] = parse_json(data, file=file)
    if fields.get("format") != "sparse_delta":
        raise UnsupportedFormat(
            "not a sparse delta", file=file, expected="format sparse_delta", found=repr(fields.get("format"))
        )
    if fields.get("format_version") == 1:
        raise UnsupportedFormat(
            "OpenRL's sparse_delta version 1 holds engine coordinates and cannot be read",
            file=file,
            expected="format_version 2",
            found=1,
            hint="Write it again with a current OpenRL.",
        )
    model = DeltaMetadata if "run_id" in fields else OpenRLMetadata
    return model.validated(data, file=file)
