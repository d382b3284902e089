# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot inspect``: what a run, a version or a local delta folder is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_delta_snapshot.cli.output import (
    human_bytes,
    open_run,
    print_fields,
    print_json,
    print_table,
    reported,
    split_target,
)
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.format.openrl import read_folder_metadata, read_openrl_delta

__all__ = ["run"]

_MOST_TENSORS = 20


def run(target: str, *, as_json: bool) -> None:
    """Find out what the target is, and show it."""
    with reported(as_json=as_json):
        if (Path(target) / layout.METADATA_NAME).is_file():
            described = _describe_folder(Path(target))
        else:
            sync_dir, version = split_target(target)
            described = _describe_run(sync_dir) if version is None else _describe_version(sync_dir, version)
    if as_json:
        print_json({"ok": True, **described})
        return
    tensors = described.pop("tensors", None)
    print_fields({name: _for_people(name, value) for name, value in described.items()})
    if tensors:
        print()
        print_table(
            ("tensor", "dtype", "shape", "changed", "density"),
            [_tensor_row(tensor) for tensor in tensors[:_MOST_TENSORS]],
        )
        if len(tensors) > _MOST_TENSORS:
            print(f"and {len(tensors) - _MOST_TENSORS} more; --json lists all")


def _describe_run(sync_dir: str) -> dict[str, Any]:
    folder = open_run(sync_dir)
    info = folder.read_run()
    versions = folder.versions()
    specs = info.specs()
    return {
        "kind": "run",
        "run_id": info.run_id,
        "created_at": info.created_at,
        "tool": info.tool,
        "base": info.base.name,
        "base_state_digest": info.base.state_digest,
        "num_tensors": len(specs),
        "total_elements": info.base.total_elements,
        "checkpoint_bytes": sum(spec.num_bytes for spec in specs.values()),
        "dtypes": sorted({spec.dtype for spec in specs.values()}),
        "encodings": list(info.encodings),
        "num_versions": len(versions),
        "newest_version": max(versions, default=0),
    }


def _describe_version(sync_dir: str, version: int) -> dict[str, Any]:
    folder = open_run(sync_dir)
    record = folder.read_version(version)
    return _describe_metadata(folder.read_metadata(record)) | {"folder": record.folder}


def _describe_folder(path: Path) -> dict[str, Any]:
    metadata = read_folder_metadata(path)
    if isinstance(metadata, DeltaMetadata):
        return _describe_metadata(metadata) | {"folder": str(path)}
    metadata, patches = read_openrl_delta(path)
    return {
        "kind": "OpenRL sparse_delta",
        "format_version": metadata.format_version,
        "base_model": metadata.base_model,
        "created_at": metadata.created_at,
        "changed_elements": sum(patch.changed for patch in patches),
        "total_elements": metadata.total_elements,
        "payload_bytes": (path / layout.delta_file_name(None)).stat().st_size,
        "folder": str(path),
        "tensors": [
            {
                "name": patch.spec.name,
                "dtype": patch.spec.dtype,
                "shape": list(patch.spec.shape),
                "changed": patch.changed,
                "encoding": "raw",
            }
            for patch in patches
        ],
    }


def _describe_metadata(metadata: DeltaMetadata) -> dict[str, Any]:
    return {
        "kind": "delta",
        "format_version": metadata.format_version,
        "run_id": metadata.run_id,
        "version": metadata.version,
        "base_version": metadata.base_version,
        "base_state_digest": metadata.base_state_digest,
        "state_digest": metadata.state_digest,
        "base_model": metadata.base_model,
        "created_at": metadata.created_at,
        "writer": metadata.writer,
        "step": metadata.step,
        "metrics": dict(metadata.metrics),
        "diff_s": metadata.timings.diff_s,
        "upload_s": metadata.timings.upload_s,
        "changed_elements": metadata.changed_elements,
        "total_elements": metadata.total_elements,
        "payload_bytes": sum(entry.bytes for entry in metadata.files),
        "files": [entry.model_dump() for entry in metadata.files],
        "tensors": [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "changed": entry.changed,
                "encoding": entry.encoding,
            }
            for entry in metadata.tensors
        ],
    }


def _for_people(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return human_bytes(value)
    if name == "files":
        return ", ".join(f"{entry['name']} ({human_bytes(entry['bytes'])})" for entry in value)
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, dict):
        return " ".join(f"{key}={number:.4g}" for key, number in value.items()) or "-"
    if isinstance(value, int):
        return f"{value:,}" if name.endswith("elements") else str(value)
    return "-" if value is None else str(value)


def _tensor_row(tensor: dict[str, Any]) -> list[object]:
    numel = 1
    for size in tensor["shape"]:
        numel *= size
    shape = "x".join(map(str, tensor["shape"])) or "scalar"
    return [
        tensor["name"],
        tensor["dtype"],
        shape,
        f"{tensor['changed']:,}",
        f"{100 * tensor['changed'] / max(1, numel):.3f} %",
    ]
