# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot inspect`` of what SkyRL wrote: one delta, or a sync_dir of them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm_delta_snapshot.interop.chain import FolderKind, list_skyrl_folders
from vllm_delta_snapshot.interop.skyrl import SkyRLDelta, open_skyrl_delta
from vllm_delta_snapshot.interop.skyrl_manifest import read_manifest

__all__ = ["describe_skyrl", "describe_skyrl_sync_dir"]


def describe_skyrl(folder: Path) -> dict[str, Any]:
    """Describe one delta. Decompresses it, to count what changes.

    Raises:
        DeltaSnapshotError: it is damaged.
    """
    delta = open_skyrl_delta(folder)
    tensors = [_describe_tensor(delta, name) for name in delta.specs]
    manifest = delta.manifest
    return {
        "kind": FolderKind.SKYRL.value,
        "version": manifest.version,
        "base_version": manifest.base_version,
        "changed_elements": sum(tensor["changed"] for tensor in tensors),
        "uncompressed_bytes": manifest.total_uncompressed_num_bytes,
        "payload_bytes": delta.payload_bytes,
        "checksums": sorted({tensor.algorithm for tensor in manifest.tensors}),
        "files": [{"name": name, "bytes": (folder / name).stat().st_size} for name in manifest.payload_files],
        "folder": str(folder),
        "tensors": tensors,
    }


def describe_skyrl_sync_dir(sync_dir: Path) -> dict[str, Any]:
    """Describe a sync_dir. Reads the manifests, no payload.

    Raises:
        DeltaSnapshotError: a manifest is damaged.
    """
    folders = list_skyrl_folders(sync_dir)
    versions = [_describe_version(folder) for folder in folders.values()]
    return {
        "kind": FolderKind.SKYRL_SYNC_DIR.value,
        "num_versions": len(folders),
        "newest_version": max(folders, default=0),
        "missing": [[a + 1, b - 1] for a, b in pairwise([0, *folders]) if b > a + 1],
        "compressed_bytes": sum(version["compressed_bytes"] for version in versions),
        "folder": str(sync_dir),
        "versions": versions,
    }


def _describe_version(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    return {
        "version": manifest.version,
        "base_version": manifest.base_version,
        "changed_tensors": len(manifest.tensors),
        "uncompressed_bytes": manifest.total_uncompressed_num_bytes,
        "compressed_bytes": manifest.total_compressed_num_bytes,
    }


def _describe_tensor(delta: SkyRLDelta, name: str) -> dict[str, Any]:
    spec = delta.specs[name]
    return {
        "name": name,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "changed": delta.count_changed(name),
        "encoding": "xor, zstd",
    }
