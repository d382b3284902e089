# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot inspect``: what a run, a version or a local delta folder is, SkyRL's and OpenRL's included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from vllm_delta_snapshot.cli.inspect_skyrl import describe_skyrl, describe_skyrl_sync_dir
from vllm_delta_snapshot.cli.output import (
    EXIT_PROBLEM,
    human_bytes,
    open_run,
    print_fields,
    print_json,
    print_table,
    reported,
    split_target,
)
from vllm_delta_snapshot.cli.targets import split_folder
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.interop.chain import FolderKind, kind_of
from vllm_delta_snapshot.interop.openrl import read_folder_metadata, read_openrl_delta
from vllm_delta_snapshot.interop.skyrl_manifest import delta_name

__all__ = ["run"]

_MOST_ROWS = 20


def run(target: str, *, as_json: bool) -> None:
    """Find out what the target is, and show it."""
    with reported(as_json=as_json):
        described = _describe(target)
    stray = described.get("out_of_line")
    if as_json:
        print_json({"ok": stray is None, **described})
    else:
        _print(described)
    if stray is not None:
        if not as_json:
            typer.echo(stray, err=True)
        raise typer.Exit(EXIT_PROBLEM)


def _print(described: dict[str, Any]) -> None:
    tensors, versions = described.pop("tensors", []), described.pop("versions", [])
    print_fields({name: _for_people(name, value) for name, value in described.items()})
    _print_rows(("tensor", "dtype", "shape", "changed", "density"), [_tensor_row(tensor) for tensor in tensors])
    _print_rows(("version", "base", "tensors", "bytes", "of full"), [_version_row(version) for version in versions])


def _print_rows(columns: tuple[str, ...], rows: list[list[object]]) -> None:
    if rows:
        print()
        print_table(columns, rows[:_MOST_ROWS])
    if len(rows) > _MOST_ROWS:
        print(f"and {len(rows) - _MOST_ROWS} more; --json lists all")


def _describe(target: str) -> dict[str, Any]:
    folder, number = split_folder(target)
    described = None if folder is None else _describe_local(folder, number)
    if described is not None:
        return described
    sync_dir, version = split_target(target)
    return _describe_run(sync_dir) if version is None else _describe_version(sync_dir, version)


def _describe_local(folder: Path, number: int | None) -> dict[str, Any] | None:
    """Describe a delta's folder, or what another tool wrote; ``None`` for a run."""
    kind = kind_of(folder)
    if kind in (FolderKind.DELTA, FolderKind.OPENRL) and number is None:
        return _describe_folder(folder)
    if kind is FolderKind.SKYRL and number is None:
        return describe_skyrl(folder)
    if kind is FolderKind.SKYRL_SYNC_DIR:
        return describe_skyrl_sync_dir(folder) if number is None else describe_skyrl(folder / delta_name(number))
    return None


def _describe_run(sync_dir: str) -> dict[str, Any]:
    folder = open_run(sync_dir)
    info = folder.read_run()
    versions, shortcuts = folder.versions(), folder.shortcuts()
    newest, stray = folder.newest_and_stray()
    wrong = [str(error) for error in (stray, folder.mark_problem()) if error is not None]
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
        "newest_version": newest,
        "out_of_line": "; ".join(wrong) or None,
        "anchors": list(shortcuts.anchors),
        "merged": [list(step) for step in shortcuts.merged],
        "pruned_up_to": shortcuts.pruned,
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
            for entry in metadata.by_tensor
        ],
    }


def _for_people(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return human_bytes(value)
    if name == "files":
        return ", ".join(f"{entry['name']} ({human_bytes(entry['bytes'])})" for entry in value)
    if name == "merged":
        return ", ".join(f"{base} to {version}" for base, version in value) or "-"
    if name == "missing":
        return ", ".join(f"{first} to {last}" if last > first else str(first) for first, last in value) or "-"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
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


def _version_row(version: dict[str, Any]) -> list[object]:
    return [
        version["version"],
        version["base_version"],
        version["changed_tensors"],
        human_bytes(version["compressed_bytes"]),
        f"{100 * version['compressed_bytes'] / max(1, version['uncompressed_bytes']):.2f} %",
    ]
