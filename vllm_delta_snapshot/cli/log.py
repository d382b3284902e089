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
        versions = [_describe(folder, version) for version in folder.versions()]
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
            }
        )
        return
    typer.echo(f"run {info.run_id}, base {info.base.name}, checkpoint {human_bytes(checkpoint_bytes)}")
    print_table(
        ("version", "step", "changed", "density", "bytes", "of full", "created", "metrics"),
        [_row(version, checkpoint_bytes) for version in versions],
    )


def _describe(folder: RunFolder, version: int) -> dict[str, Any]:
    record = folder.read_version(version)
    metadata = folder.read_metadata(record)
    return {
        "version": version,
        "base_version": record.base_version,
        "kind": record.kind,
        "step": metadata.step,
        "changed_elements": record.changed_elements,
        "total_elements": metadata.total_elements,
        "changed_tensors": len(metadata.tensors),
        "payload_bytes": record.payload_bytes,
        "state_digest": record.state_digest,
        "created_at": record.created_at,
        "diff_s": metadata.timings.diff_s,
        "upload_s": metadata.timings.upload_s,
        "metrics": dict(metadata.metrics),
    }


def _row(version: dict[str, Any], checkpoint_bytes: int) -> list[object]:
    return [
        version["version"],
        "" if version["step"] is None else version["step"],
        f"{version['changed_elements']:,}",
        f"{100 * version['changed_elements'] / max(1, version['total_elements']):.3f} %",
        human_bytes(version["payload_bytes"]),
        f"{100 * version['payload_bytes'] / max(1, checkpoint_bytes):.2f} %",
        version["created_at"][:19],
        " ".join(f"{name}={value:.4g}" for name, value in version["metrics"].items()),
    ]
