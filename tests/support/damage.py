"""Damages to version 1 of a run folder that has two versions of one payload file each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def payload(run: Path, version: int) -> Path:
    """Return the one payload file of a version."""
    (folder,) = (run / "deltas").glob(f"{version:08d}-*")
    return folder / "delta.safetensors"


def flip_payload(run: Path) -> None:
    """Flip one bit of the payload."""
    path = payload(run, 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate_payload(run: Path) -> None:
    """Cut the payload short."""
    path = payload(run, 1)
    path.write_bytes(path.read_bytes()[:-7])


def remove_payload(run: Path) -> None:
    """Remove the payload."""
    payload(run, 1).unlink()


def flip_metadata(run: Path) -> None:
    """Change one character of the metadata."""
    path = payload(run, 1).with_name("metadata.json")
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"BF15"', 1))


def foreign_record(run: Path) -> None:
    """Make the commit another run's."""
    path = run / "versions" / "00000001.json"
    record = json.loads(path.read_text())
    record["run_id"] = "00000000-0000-0000-0000-000000000000"
    path.write_text(json.dumps(record))


def unknown_format(run: Path) -> None:
    """Make the commit one of a later format."""
    path = run / "versions" / "00000001.json"
    record = json.loads(path.read_text())
    record["format_version"] = 99
    path.write_text(json.dumps(record))


def out_of_order(run: Path) -> None:
    """Version 2's content in version 1's place."""
    second = json.loads((run / "versions" / "00000002.json").read_text())
    folder = run / second["folder"]
    moved = folder.with_name(folder.name.replace("00000002", "00000001"))
    shutil.move(folder, moved)
    second |= {"version": 1, "base_version": 0, "folder": f"deltas/{moved.name}"}
    (run / "versions" / "00000001.json").write_text(json.dumps(second))


def missing_version(run: Path) -> None:
    """Remove the commit."""
    (run / "versions" / "00000001.json").unlink()


def flip_first_byte(path: Path) -> None:
    """Flip one bit of a file's first byte."""
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
