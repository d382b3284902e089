# SPDX-License-Identifier: Apache-2.0
"""Folders that OpenRL wrote: its sparse_delta version 2, read against a table of tensors.

Such a folder has no version, no base, no checksum and no commit mark. What can be checked is checked: names, shapes,
element types, order and range of positions. Whether it fits the weights at hand, only its producer knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vllm_delta_snapshot.errors import CorruptFile, ObjectNotFound
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.container import StoredChange, decode_file
from vllm_delta_snapshot.format.metadata import (
    MAX_METADATA_BYTES,
    DeltaMetadata,
    OpenRLMetadata,
    parse_metadata,
)
from vllm_delta_snapshot.format.safetensors_io import MappedFile
from vllm_delta_snapshot.types import TensorPatch, TensorSpec
from vllm_delta_snapshot.util.regular_file import read_bounded

__all__ = ["read_folder_metadata", "read_openrl_delta"]


def read_folder_metadata(folder: Path) -> DeltaMetadata | OpenRLMetadata:
    """Read metadata.json of a local delta folder, of either writer.

    Raises:
        ObjectNotFound: the folder has none.
        LimitExceeded, CorruptFile, UnsupportedFormat: see `parse_metadata`.
    """
    path = folder / layout.METADATA_NAME
    try:
        return parse_metadata(read_bounded(path, MAX_METADATA_BYTES), file=str(path))
    except (FileNotFoundError, NotADirectoryError):
        raise ObjectNotFound(
            "no metadata.json, so this is no delta",
            file=str(path),
            hint="A delta folder holds metadata.json and delta.safetensors.",
        ) from None


def read_openrl_delta(
    folder: Path, specs: Mapping[str, TensorSpec] | None = None
) -> tuple[OpenRLMetadata, list[TensorPatch]]:
    """Read an OpenRL sparse_delta folder.

    Args:
        folder: holds metadata.json and delta.safetensors.
        specs: the tensors that the receiver has; ``None`` takes the folder's own word (to inspect it).

    Returns:
        Its metadata and its patches, views of the mapped file.

    Raises:
        CorruptFile: the folder contradicts itself, or a tensor does not fit `specs`.
        UnsupportedFormat, LimitExceeded, ObjectNotFound: see `read_folder_metadata` and `MappedFile`.
    """
    metadata = read_folder_metadata(folder)
    if isinstance(metadata, DeltaMetadata):
        raise CorruptFile(
            "this delta belongs to a run and must be applied in its order",
            file=str(folder),
            found=f"run {metadata.run_id} version {metadata.version}",
            hint="Give the run's folder as sync_dir, and the version.",
        )
    path = folder / layout.delta_file_name(None)
    mapped = MappedFile(path)
    stored = [
        _stored(path, mapped, place, name, shape, specs)
        for place, (name, shape) in enumerate(zip(metadata.layer_names, metadata.layer_shapes, strict=True))
    ]
    # `raw` decodes to patches and nothing else.
    return metadata, [change for change in decode_file(path, stored) if isinstance(change, TensorPatch)]


def _stored(
    path: Path,
    mapped: MappedFile,
    place: int,
    name: str,
    shape: tuple[int, ...],
    specs: Mapping[str, TensorSpec] | None,
) -> StoredChange:
    values = mapped.specs.get(f"{place}.values")
    if values is None:
        raise CorruptFile("values are missing", file=str(path), tensor=name, expected=f"key {place}.values")
    spec = TensorSpec(name, shape, values.dtype)
    if specs is not None and specs.get(name) != spec:
        raise CorruptFile(
            "tensor does not fit this model",
            file=str(path),
            tensor=name,
            expected=specs.get(name, "no such tensor"),
            found=spec,
        )
    return StoredChange(place, spec, values.numel, "raw", place)
