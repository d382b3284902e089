"""Make the committed golden files: ``python -m tests.golden.make``. Never run by the tests.

A change of any byte these files pin is a change of the format, and needs a new format version. Everything that would
differ from run to run (ids, times) is fixed here.

`run` is as the first release wrote it: raw, several files named ``-of-``. `compact` has a version for every encoding.
`merged` is what a stager makes of its last two versions. `parts` has tensors whose changes come from several trainers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
import zstandard

from tests.support.wire import RUN_ID
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.format.blocks import EncodedBlock, Placed, group_blocks
from vllm_delta_snapshot.format.container import plan_file
from vllm_delta_snapshot.format.digest import format_digest, patch_digest, state_digest
from vllm_delta_snapshot.format.encodings import encoding_of
from vllm_delta_snapshot.format.layout import delta_file_name
from vllm_delta_snapshot.format.metadata import DeltaMetadata, FileEntry, TensorEntry, Timings
from vllm_delta_snapshot.format.run import BaseIdentity, RunInfo
from vllm_delta_snapshot.format.safetensors_io import NamedBits, file_chunks
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.format.wire import SpecEntry
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch, TensorSpec

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

COMPACT_SPECS = [
    TensorSpec(f"model.{code.lower()}.weight", (6, 8), code)
    for code in ("U8", "F8_E4M3", "BF16", "F16", "F32", "I32", "F64", "C64")
] + [
    TensorSpec("model.scalar", (), "F32"),
    TensorSpec("model.void", (0, 4), "BF16"),
    TensorSpec("model.é", (2,), "BF16"),
    TensorSpec("model.wide", (140_000,), "F8_E5M2"),
]
"""Two of every width, so that tensors share blocks; one with gaps of more than 16 bits."""

State = dict[str, Bits]


def base_state(specs: Sequence[TensorSpec] = SPECS) -> State:
    """Return the base: a fixed pattern that uses every byte of an element."""
    state = {}
    for place, spec in enumerate(specs):
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


Files = list[tuple[str, list[EncodedBlock]]]
"""The files of a version: their names, and the blocks in each."""


def raw_files(version: int) -> Files:
    """Return the files of a version as the first release named and filled them."""
    groups: list[list[EncodedBlock]] = [[]]
    for place, patch in enumerate(patches_of(version)):
        block = _encoded("raw", [Placed(place, patch, "raw")])
        size = sum(other.num_bytes for other in groups[-1])
        if groups[-1] and size + block.num_bytes > MAX_FILE_BYTES.get(version, 10**9):
            groups.append([])
        groups[-1].append(block)
    if len(groups) == 1:
        return [("delta.safetensors", groups[0])]
    return [(f"delta-{n + 1:05d}-of-{len(groups):05d}.safetensors", group) for n, group in enumerate(groups)]


COMPACT_ENCODINGS = {
    1: ("packed",),
    2: ("bitmap",),
    3: ("dense",),
    4: ("difference",),
    5: ("bitmap_difference",),
    6: ("dense_difference",),
    7: ("raw_difference",),
    8: ("raw",),
    9: ("packed", "difference", "raw", "bitmap_difference", "raw_difference", "bitmap"),
}
"""Spelled out, as the element types are."""

COMPACT_FILES = {9: 3}
"""How many files a version has, if more than one."""

_STEPS = (1, -1, -1, 1, 2, 300, -129, 1, -70_000)


def compact_changes(version: int, state: State) -> list[tuple[Change, str]]:
    """Return the changes of a version of `compact`, and their encodings.

    Args:
        version: the version.
        state: the one before.
    """
    names = COMPACT_ENCODINGS[version]
    changes = []
    for place, spec in enumerate(COMPACT_SPECS):
        encoding = names[place // 2 % len(names)]
        positions = _compact_positions(version, spec, is_dense=encoding.startswith("dense"))
        if not positions.size:
            continue
        old = state[spec.name][positions]
        steps = [_STEPS[(place + version + i) % len(_STEPS)] for i in range(positions.size)]
        moves = np.array([step % (1 << (8 * spec.element.itemsize)) for step in steps], spec.element.bits)
        if encoding_of(encoding).is_difference:
            changes.append((TensorDifference(spec, positions, moves), encoding))
        else:
            changes.append((TensorPatch(spec, positions, old + moves), encoding))
    return changes


def merged_changes(before: State, after: State) -> list[tuple[Change, str]]:
    """Return the differences between two states of `compact`; of every second tensor, some values are absolute."""
    changes: list[tuple[Change, str]] = []
    for place, spec in enumerate(COMPACT_SPECS):
        old, new = before[spec.name], after[spec.name]
        positions = np.flatnonzero(old != new).astype(np.int32)
        absolute = np.arange(positions.size) % 3 == 1
        moves = (new - old)[positions]
        if place % 2:
            change = TensorDifference(spec, positions, moves)
        else:
            change = TensorDifference(spec, positions, np.where(absolute, new[positions], moves), absolute)
        if positions.size:
            changes.append((change, "raw_difference"))
    return changes


def _compact_positions(version: int, spec: TensorSpec, *, is_dense: bool) -> np.ndarray:
    if spec.name == "model.wide":
        return np.array([] if is_dense else [3, 65_538, 131_074, 131_075, 139_990 + version], np.int32)
    if is_dense:
        return np.arange(spec.numel, dtype=np.int32)
    return np.arange(version % 2 if spec.numel > 1 else 0, spec.numel, 1 + version % 3, dtype=np.int32)


def compact_files(version: int, changes: Sequence[tuple[Change, str]]) -> Files:
    """Return the files of a version of `compact`. No block is raw that was not to be."""
    placed = [Placed(place, change, encoding) for place, (change, encoding) in enumerate(changes)]
    blocks = [_encoded(block.encoding, block.members) for block in group_blocks(placed)]
    count = COMPACT_FILES.get(version, 1)
    return [(delta_file_name(None if count == 1 else n), blocks[n::count]) for n in range(count)]


PARTS_ENCODINGS = {1: ("packed", "raw"), 2: ("difference", "raw_difference"), 3: ("bitmap_difference", "packed")}
"""Of the tensors in parts, and of those that one trainer has whole."""

PARTS_TRAINERS = 3


def parts_changes(version: int, state: State) -> list[tuple[Change, str, int]]:
    """Return the changes of a version of `parts`, their encodings, and which of the trainers wrote each.

    Every second tensor is in parts, of consecutive elements or of pairs dealt out in turn.
    """
    in_parts, whole = PARTS_ENCODINGS[version]
    changes = []
    for place, spec in enumerate(COMPACT_SPECS):
        is_split = place % 2 == 0 and spec.numel > 1
        encoding = in_parts if is_split else whole
        positions = _compact_positions(version, spec, is_dense=False)
        holder = positions * PARTS_TRAINERS // max(1, spec.numel) if place % 4 else positions // 2 % PARTS_TRAINERS
        for trainer in range(PARTS_TRAINERS):
            held = positions[holder == trainer] if is_split else positions[: positions.size * (trainer == place % 3)]
            if held.size:
                steps = [_STEPS[(int(i) + place) % len(_STEPS)] for i in held]
                moves = np.array([step % (1 << (8 * spec.element.itemsize)) for step in steps], spec.element.bits)
                if encoding_of(encoding).is_difference:
                    changes.append((TensorDifference(spec, held, moves), encoding, trainer))
                else:
                    changes.append((TensorPatch(spec, held, state[spec.name][held] + moves), encoding, trainer))
    return changes


def parts_files(changes: Sequence[tuple[Change, str, int]]) -> Files:
    """Return the files of a version of `parts`: one a trainer."""
    files = []
    for trainer in range(PARTS_TRAINERS):
        placed = [Placed(place, change, name) for place, (change, name, of) in enumerate(changes) if of == trainer]
        blocks = [_encoded(block.encoding, block.members) for block in group_blocks(placed)]
        files.append((f"rank{trainer:05d}-{delta_file_name(None)}", blocks))
    return files


def _encoded(encoding: str, members: Sequence[Placed]) -> EncodedBlock:
    return EncodedBlock(encoding, tuple(members), encoding_of(encoding).encode([m.change for m in members]))


@dataclass
class _Run:
    """A run that is being written: a folder, and the state at every version so far."""

    name: str
    specs: list[TensorSpec]
    encodings: tuple[str, ...]
    states: list[State] = field(default_factory=list)
    is_in_parts: bool = False

    def __post_init__(self) -> None:
        shutil.rmtree(FOLDER / self.name, ignore_errors=True)
        self.states.append(base_state(self.specs))
        _write(f"{self.name}/run.json", self._info().to_json())

    @property
    def digests(self) -> list[str]:
        return [format_digest(state_digest((spec, state[spec.name]) for spec in self.specs)) for state in self.states]

    def publish(self, version: int, changes: Sequence[tuple[Change, str]], files: Files) -> None:
        folder = f"deltas/{version:08d}-{version:08x}"
        self.states.append(_after(self.states[-1], changes))
        metadata = self.write(f"{self.name}/{folder}", (version - 1, version), changes, files)
        data = metadata.to_json()
        record = VersionRecord(
            run_id=RUN_ID,
            version=version,
            base_version=version - 1,
            publication_id=metadata.publication_id,
            folder=folder,
            metadata_bytes=len(data),
            metadata_xxh3_128=xxhash.xxh3_128_hexdigest(data),
            payload_bytes=sum(entry.bytes for entry in metadata.files),
            changed_elements=metadata.changed_elements,
            base_state_digest=metadata.base_state_digest,
            state_digest=metadata.state_digest,
            created_at=TIME,
        )
        _write(f"{self.name}/versions/{version:08d}.json", record.to_json())

    def write(
        self, folder: str, versions: tuple[int, int], changes: Sequence[tuple[Change, str]], files: Files
    ) -> DeltaMetadata:
        """Write a delta's folder. Over several versions, the digests of the old values are left out."""
        entries = []
        for name, blocks in files:
            data = b"".join(plan_file(name, blocks).chunks())
            _write(f"{folder}/{name}", data)
            entries.append(FileEntry(name=name, bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data)))
        metadata = self._metadata(versions, changes, files, entries)
        _write(f"{folder}/metadata.json", metadata.to_json())
        return metadata

    def _info(self) -> RunInfo:
        return RunInfo(
            run_id=RUN_ID,
            created_at=TIME,
            tool="golden",
            encodings=self.encodings,
            base=BaseIdentity(
                name="golden/base",
                state_digest=self.digests[0],
                num_tensors=len(self.specs),
                total_elements=sum(spec.numel for spec in self.specs),
            ),
            tensors=tuple(SpecEntry.of(spec) for spec in self.specs),
        )

    def _metadata(
        self,
        versions: tuple[int, int],
        changes: Sequence[tuple[Change, str]],
        files: Files,
        entries: list[FileEntry],
    ) -> DeltaMetadata:
        base_version, version = versions
        before, after = (self.states[number] for number in versions)
        places = _places(files, is_block_said=self.is_in_parts)
        alone = 2 if len(files) == 1 and self.encodings == ("raw",) else 3
        tensors = tuple(
            _entry(change, encoding, places[place], before, after, old_is_known=version == base_version + 1)
            for place, (change, encoding) in enumerate(changes)
        )
        changed = sum(entry.changed for entry in tensors)
        total = sum(spec.numel for spec in self.specs)
        return DeltaMetadata(
            format_version=4 if self.is_in_parts else alone,
            base_model="golden/base",
            created_at=TIME,
            timestamp=1767323045.25,
            changed_elements=changed,
            total_elements=total,
            density_pct=round(100 * changed / total, 3),
            layer_names=tuple(entry.name for entry in tensors),
            layer_shapes=tuple(entry.shape for entry in tensors),
            run_id=RUN_ID,
            publication_id=f"{version:08x}" * 4,
            version=version,
            base_version=base_version,
            base_state_digest=self.digests[base_version],
            state_digest=self.digests[version],
            files=tuple(entries),
            tensors=tensors,
            step=10 * version,
            metrics={"reward": 0.5},
            timings=Timings(diff_s=0.5, upload_s=0.25),
            writer="golden",
        )


def _entry(
    change: Change,
    encoding: str,
    place: tuple[int, int | None],
    before: State,
    after: State,
    *,
    old_is_known: bool,
) -> TensorEntry:
    spec, positions = change.spec, change.positions
    old, new = (patch_digest(spec, positions, state[spec.name][positions]) for state in (before, after))
    return TensorEntry(
        name=spec.name,
        shape=spec.shape,
        dtype=spec.dtype,
        changed=change.changed,
        encoding=encoding,
        file=place[0],
        block=place[1],
        old_digest=format_digest(old) if old_is_known else None,
        new_digest=format_digest(new if old_is_known else new - old),
    )


def _after(state: State, changes: Sequence[tuple[Change, str]]) -> State:
    result = {name: bits.copy() for name, bits in state.items()}
    for change, _ in changes:
        bits = result[change.spec.name]
        patch = change.resolve(bits[change.positions]) if isinstance(change, TensorDifference) else change
        bits[patch.positions] = patch.values
    return result


def _places(files: Files, *, is_block_said: bool) -> dict[int, tuple[int, int | None]]:
    """Return the file and, if it is shared or to be said, the block of every place."""
    return {
        member.place: (number, block.place if is_block_said or len(block.members) > 1 else None)
        for number, (_, blocks) in enumerate(files)
        for block in blocks
        for member in block.members
    }


def _write(key: str, data: bytes) -> None:
    path = FOLDER / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def main() -> None:
    """Write everything anew."""
    tensors = [NamedBits(spec, base_state()[spec.name]) for spec in SPECS]
    _write("base/model.safetensors", b"".join(file_chunks(tensors, {"format": "pt"})))
    run = _Run("run", SPECS, ("raw",))
    for version in (1, 2, 3, 4):
        run.publish(version, [(patch, "raw") for patch in patches_of(version)], raw_files(version))
    states = [{name: bits.tobytes().hex() for name, bits in state.items()} for state in run.states]
    _write_json("expected.json", {"state_digests": run.digests, "states": states})

    compact = _Run("compact", COMPACT_SPECS, tuple(sorted({name for v in COMPACT_ENCODINGS.values() for name in v})))
    for version in COMPACT_ENCODINGS:
        changes = compact_changes(version, compact.states[-1])
        compact.publish(version, changes, compact_files(version, changes))
    merged = merged_changes(compact.states[7], compact.states[9])
    compact.write("merged", (7, 9), merged, compact_files(0, merged))
    parts = _Run("parts", COMPACT_SPECS, tuple(sorted({n for v in PARTS_ENCODINGS.values() for n in v})))
    parts.is_in_parts = True
    for version in PARTS_ENCODINGS:
        of_trainers = parts_changes(version, parts.states[-1])
        parts.publish(version, [(change, encoding) for change, encoding, _ in of_trainers], parts_files(of_trainers))
    _write_json("expected_parts.json", {"state_digests": parts.digests})
    _write_json("expected_compact.json", {"zstd": list(zstandard.ZSTD_VERSION), "state_digests": compact.digests})


def _write_json(key: str, value: object) -> None:
    _write(key, json.dumps(value, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
