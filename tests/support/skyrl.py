"""SkyRL's delta folders, from their description: a writer by the libraries that SkyRL uses, and chains of them.

Nothing of ours is used to write, so that it can judge what we read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import write_checkpoint
from tests.support.runs import State, TinyTrainer
from tests.support.tensors import bits_of

Weights = Mapping[str, torch.Tensor]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes."""
    if not tensor.numel():
        return b""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def xor_of(one: bytes, other: bytes) -> bytes:
    """Return the exclusive or of two byte strings of one length."""
    return np.bitwise_xor(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)).tobytes()


def checksum_of(data: bytes, algorithm: str) -> str:
    """Return a checksum, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data) if algorithm == "xxh3-128" else hashlib.sha256(data).hexdigest()


def u8(data: bytes) -> torch.Tensor:
    """Return bytes as a tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def write_skyrl_delta(
    folder: Path,
    old: Weights,
    new: Weights,
    *,
    version: int = 1,
    base_version: int | None = None,
    algorithm: str = "xxh3-128",
    is_early: bool = False,
    with_unchanged: bool = False,
    tensors_a_file: int = 1000,
) -> Path:
    """Write a delta folder as SkyRL's publisher does.

    Args:
        folder: is made.
        old: the weights at `base_version`.
        new: the weights at `version`.
        version: the version.
        base_version: by default the one before.
        algorithm: of the checksums.
        is_early: as early writers did: the key ``sha256``, and no algorithm.
        with_unchanged: also write tensors that did not change.
        tensors_a_file: payload tensors in a file.
    """
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = []
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in new.items():
        before, after = bytes_of(old[name]), bytes_of(tensor)
        if before == after and not with_unchanged:
            continue
        frame = zstandard.ZstdCompressor(level=1).compress(xor_of(before, after))
        file = f"delta-rank00000-file{len(records) // tensors_a_file:06d}.safetensors"
        files.setdefault(file, {})[name] = u8(frame)
        record = {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "uncompressed_num_bytes": len(after),
            "compressed_num_bytes": len(frame),
            "payload_file": file,
            "payload_key": name,
        }
        if is_early:
            record["sha256"] = checksum_of(after, "sha256")
        else:
            record |= {"checksum": checksum_of(after, algorithm), "checksum_algorithm": algorithm}
        records.append(record)
    for file, payload in files.items():
        save_file(payload, folder / file)
    manifest = {
        "version": version,
        "base_version": version - 1 if base_version is None else base_version,
        "tensors": records,
        "total_uncompressed_num_bytes": sum(record["uncompressed_num_bytes"] for record in records),
        "total_compressed_num_bytes": sum(record["compressed_num_bytes"] for record in records),
        "payload_files": list(files),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def edit_manifest(folder: Path, /, **changes: Any) -> Path:
    """Change fields of a manifest, as no honest writer would."""
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def edit_tensor(folder: Path, place: int = 0, /, **changes: Any) -> Path:
    """Change fields of one tensor in a manifest; a field that becomes ``...`` is taken away."""
    tensors = json.loads((folder / "manifest.json").read_text())["tensors"]
    tensors[place] = {name: value for name, value in (tensors[place] | changes).items() if value is not ...}
    return edit_manifest(folder, tensors=tensors)


def replace_payload(folder: Path, name: str, frame: bytes) -> Path:
    """Put another frame in place of a tensor's, its size and the total into the manifest; in a folder of one file."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (file,) = manifest["payload_files"]
    save_file(load_file(folder / file) | {name: u8(frame)}, folder / file)
    for record in manifest["tensors"]:
        if record["name"] == name:
            record["compressed_num_bytes"] = len(frame)
    total = sum(record["compressed_num_bytes"] for record in manifest["tensors"])
    return edit_manifest(folder, tensors=manifest["tensors"], total_compressed_num_bytes=total)


@dataclass
class SkyRLRun:
    """A base checkpoint, a sync_dir, and the true bits at every version, from 0."""

    base: Path
    sync_dir: Path
    history: list[State]

    def delta(self, version: int) -> Path:
        """Return a version's folder."""
        return self.sync_dir / f"delta-{version:08d}"


def make_skyrl_run(folder: Path, versions: int = 5, *, seed: object = 0, shards: int = 1, **options: Any) -> SkyRLRun:
    """Write a base checkpoint and the deltas of a tiny trainer's steps."""
    trainer = TinyTrainer(seed)
    run = SkyRLRun(
        write_checkpoint(folder / "base", trainer.weights, shards=shards), folder / "sync", [trainer.state()]
    )
    run.sync_dir.mkdir()
    for version in range(1, versions + 1):
        before = {name: tensor.clone() for name, tensor in trainer.weights.items()}
        trainer.step(version)
        write_skyrl_delta(run.delta(version), before, trainer.weights, version=version, **options)
        run.history.append(trainer.state())
    return run


def changed_between(before: State, after: State) -> dict[str, list[int]]:
    """Return the positions that differ, by tensor; tensors without any are left out."""
    found = {
        name: [i for i, pair in enumerate(zip(before[name], after[name], strict=True)) if pair[0] != pair[1]]
        for name in before
    }
    return {name: positions for name, positions in found.items() if positions}


def state_of(weights: Weights) -> State:
    """Return the bits of all tensors."""
    return {name: bits_of(tensor) for name, tensor in weights.items()}
