# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot log``: the versions of a run, one a line."""

from __future__ import annotations

from typing import Any

import typer

from vllm_delta_snapshot.cli.output import human_bytes, open_run, print_json, print_table, reported
from vllm_delta_snapshot.run_folder import RunFolder

__all__ = ["run"]


def run(sync_dir: str, *, as_json: bool) -> None:
    """List the versions."""
    with reported(as_json=as_json):
        folder = open_run(sync_dir)
        shortcuts = folder.shortcuts()
        versions = [
            _describe(folder, version, is_pruned=version <= shortcuts.pruned, is_anchor=version in shortcuts.anchors)
            for version in folder.versions()
        ]
        info = folder.read_run()
        checkpoint_bytes = sum(spec.num_bytes for spec in info.specs().values())
    if as_json:
        print_json(
            {
                "ok": True,
                "run_id": info.run_id,
                "base": info.base.name,
                "checkpoint_bytes": checkpoint_bytes,
                "versions": versions,
                "anchors": list(shortcuts.anchors),
                "merged": [list(step) for step in shortcuts.merged],
                "pruned_up_to": shortcuts.pruned,
            }
        )
        return
    typer.echo(f"run {info.run_id}, base {info.base.name}, checkpoint {human_bytes(checkpoint_bytes)}")
    if shortcuts.merged:
        typer.echo("merged deltas: " + ", ".join(f"{base} to {version}" for base, version in shortcuts.merged))
    print_table(
        ("version", "step", "changed", "density", "bytes", "of full", "created", "kept", "metrics"),
        [_row(version, checkpoint_bytes) for version in versions],
    )


def _describe(folder: RunFolder, version: int, *, is_pruned: bool, is_anchor: bool) -> dict[str, Any]:
    record = folder.read_version(version)
    metadata = None if is_pruned else folder.read_metadata(record)  # of those only the record is left
    return {
        "version": version,
        "base_version": record.base_version,
        "kind": record.kind,
        "step": metadata and metadata.step,
        "changed_elements": record.changed_elements,
        "total_elements": folder.read_run().base.total_elements,
        "changed_tensors": metadata and len(metadata.tensors),
        "payload_bytes": record.payload_bytes,
        "state_digest": record.state_digest,
        "created_at": record.created_at,
        "diff_s": metadata and metadata.timings.diff_s,
        "upload_s": metadata and metadata.timings.upload_s,
        "metrics": dict(metadata.metrics) if metadata else {},
        "is_pruned": is_pruned,
        "is_anchor": is_anchor,
    }


def _kept(version: dict[str, Any]) -> str:
    """Say in what forms a version is there: as a delta, as a whole checkpoint, both, or as a record only."""
    forms = [
        name for name, is_there in (("delta", not version["is_pruned"]), ("anchor", version["is_anchor"])) if is_there
    ]
    return " + ".join(forms) or "record"


def _row(version: dict[str, Any], checkpoint_bytes: int) -> list[object]:
    return [
        version["version"],
        "" if version["step"] is None else version["step"],
        f"{version['changed_elements']:,}",
        f"{100 * version['changed_elements'] / max(1, version['total_elements']):.3f} %",
        human_bytes(version["payload_bytes"]),
        f"{100 * version['payload_bytes'] / max(1, checkpoint_bytes):.2f} %",
        version["created_at"][:19],
        _kept(version),
        " ".join(f"{name}={value:.4g}" for name, value in version["metrics"].items()),
    ]
