"""Make the committed golden files: ``python -m tests.golden.make``. Never run by the tests.

A change of any byte these files pin is a change of the format, and needs a new format version. Everything that would
differ from run to run (ids, times) is fixed here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import xxhash

from tests.support.wire import RUN_ID
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.format.container import encode_delta
from vllm_delta_snapshot.format.digest import add_digests, format_digest, patch_digest, state_digest
from vllm_delta_snapshot.format.encodings import encoding_of
from vllm_delta_snapshot.format.metadata import DeltaMetadata, FileEntry, TensorEntry, Timings
from vllm_delta_snapshot.format.run import BaseIdentity, RunInfo
from vllm_delta_snapshot.format.safetensors_io import NamedBits, file_chunks
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.format.wire import SpecEntry
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

FOLDER = Path(__file__).parent
TIME = "2026-01-02T03:04:05+00:00"
CODES = [
    "BOOL",
    "U8",
    "I8",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "F8_E8M0",
    "U16",
    "I16",
    "F16",
    "BF16",
    "U32",
    "I32",
    "F32",
    "U64",
    "I64",
    "F64",
    "C64",
]
"""Spelled out: a type that is added later must not change these files."""
SPECS = [TensorSpec(f"model.{code.lower()}.weight", (3, 5), code) for code in CODES] + [
    TensorSpec("model.scalar", (), "F32"),
    TensorSpec("model.void", (0, 4), "BF16"),
    TensorSpec("model.é", (2,), "BF16"),
]
"""Every element type of format version 1, a scalar, an empty tensor, a name that is not ASCII."""

State = dict[str, Bits]


def base_state() -> State:
    """Return the base: a fixed pattern that uses every byte of an element."""
    state = {}
    for place, spec in enumerate(SPECS):
        count = np.arange(spec.numel * spec.element.itemsize, dtype=np.uint64)
        data = ((count * np.uint64(37) + np.uint64(11 * place)) % np.uint64(251)).astype(np.uint8)
        state[spec.name] = data % 2 if spec.dtype == "BOOL" else data.view(spec.element.bits)
    return state


def patches_of(version: int) -> list[TensorPatch]:
    """Return the patches of a version: of all tensors, of some, of none, of some again."""
    patches = []
    for place, spec in enumerate(SPECS):
        if spec.numel == 0 or version == 3 or (version != 1 and (place + version) % 3):
            continue
        positions = np.arange((place + version) % 2, spec.numel, 1 + (place + version) % 4, dtype=np.int32)
        top = 1 if spec.dtype == "BOOL" else (1 << (8 * spec.element.itemsize)) - 1
        values = [(top - version - place * i * i) % (top + 1) for i in range(positions.size)]
        patches.append(TensorPatch(spec, positions, np.array(values, dtype=spec.element.bits)))
    return patches


MAX_FILE_BYTES = {4: 60}
"""Version 4 is split into several files."""


def main() -> None:
    """Write everything anew."""
    for name in ("base", "run"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    (FOLDER / "base").mkdir()
    state = base_state()
    tensors = [NamedBits(spec, state[spec.name]) for spec in SPECS]
    (FOLDER / "base" / "model.safetensors").write_bytes(b"".join(file_chunks(tensors, {"format": "pt"})))
    digest = state_digest((spec, state[spec.name]) for spec in SPECS)
    _write("run.json", _run_info(digest).to_json())
    for version in (1, 2, 3, 4):
        digest = _write_version(version, state, digest)
    expected = {"state_digests": _digests, "states": _states}
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


_digests: list[str] = []
_states: list[dict[str, str]] = []


def _run_info(digest: int) -> RunInfo:
    _digests.append(format_digest(digest))
    _states.append({name: bits.tobytes().hex() for name, bits in base_state().items()})
    return RunInfo(
        run_id=RUN_ID,
        created_at=TIME,
        tool="golden",
        encodings=("raw",),
        base=BaseIdentity(
            name="golden/base",
            state_digest=format_digest(digest),
            num_tensors=len(SPECS),
            total_elements=sum(spec.numel for spec in SPECS),
        ),
        tensors=tuple(SpecEntry.of(spec) for spec in SPECS),
    )


def _write_version(version: int, state: State, base_digest: int) -> int:
    publication_id = f"{version:08x}" * 4
    folder = f"deltas/{version:08d}-{publication_id[:8]}"
    patches = patches_of(version)
    planned = encode_delta(patches, encoding_of("raw"), max_file_bytes=MAX_FILE_BYTES.get(version, 10**9))
    files = []
    for file in planned:
        data = b"".join(file.chunks())
        _write(f"{folder}/{file.name}", data)
        files.append(FileEntry(name=file.name, bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data)))
    file_of = {place: number for number, file in enumerate(planned) for place in file.members}
    entries, digest = [], base_digest
    for place, patch in enumerate(patches):
        bits = state[patch.spec.name]
        old = patch_digest(patch.spec, patch.positions, bits[patch.positions])
        new = patch_digest(patch.spec, patch.positions, patch.values)
        digest = add_digests(digest, new, -old)
        state[patch.spec.name] = bits.copy()
        state[patch.spec.name][patch.positions] = patch.values
        entries.append(
            TensorEntry(
                name=patch.spec.name,
                shape=patch.spec.shape,
                dtype=patch.spec.dtype,
                changed=patch.changed,
                encoding="raw",
                file=file_of[place],
                old_digest=format_digest(old),
                new_digest=format_digest(new),
            )
        )
    changed = sum(patch.changed for patch in patches)
    total = sum(spec.numel for spec in SPECS)
    metadata = DeltaMetadata(
        format_version=2 if len(files) == 1 else 3,
        base_model="golden/base",
        created_at=TIME,
        timestamp=1767323045.25,
        changed_elements=changed,
        total_elements=total,
        density_pct=round(100 * changed / total, 3),
        layer_names=tuple(patch.spec.name for patch in patches),
        layer_shapes=tuple(patch.spec.shape for patch in patches),
        run_id=RUN_ID,
        publication_id=publication_id,
        version=version,
        base_version=version - 1,
        base_state_digest=format_digest(base_digest),
        state_digest=format_digest(digest),
        files=tuple(files),
        tensors=tuple(entries),
        step=10 * version,
        metrics={"reward": 0.5},
        timings=Timings(diff_s=0.5, upload_s=0.25),
        writer="golden",
    ).to_json()
    _write(f"{folder}/metadata.json", metadata)
    record = VersionRecord(
        run_id=RUN_ID,
        version=version,
        base_version=version - 1,
        publication_id=publication_id,
        folder=folder,
        metadata_bytes=len(metadata),
        metadata_xxh3_128=xxhash.xxh3_128_hexdigest(metadata),
        payload_bytes=sum(entry.bytes for entry in files),
        changed_elements=changed,
        base_state_digest=format_digest(base_digest),
        state_digest=format_digest(digest),
        created_at=TIME,
    )
    _write(f"versions/{version:08d}.json", record.to_json())
    _digests.append(format_digest(digest))
    _states.append({name: bits.tobytes().hex() for name, bits in state.items()})
    return digest


def _write(key: str, data: bytes) -> None:
    path = FOLDER / "run" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


if __name__ == "__main__":
    main()
