"""A local cache of the Hugging Face Hub, laid out as huggingface_hub does it: snapshots of links to blobs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(
    cache: Path, folder: Path, *, name: str = "org/model", commit: str = COMMIT, refs: Iterable[str] = ("main",)
) -> Path:
    """Put the files of a folder into the cache as a snapshot of a model; return the snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for place in (repository / "blobs", repository / "refs", snapshot):
        place.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        blob = repository / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    for ref in refs:
        (repository / "refs" / ref).write_text(commit)
    return snapshot


def list_files(snapshot: Path, names: Iterable[str]) -> None:
    """Note in the cache which files the Hub has at a snapshot's commit, as a download does."""
    trees = snapshot.parents[1] / "trees"
    trees.mkdir(exist_ok=True)
    files = {name: {"size": 1, "blob_id": "0" * 40} for name in names}
    (trees / f"{snapshot.name}.json").write_text(json.dumps({"format_version": 1, "files": files}))
