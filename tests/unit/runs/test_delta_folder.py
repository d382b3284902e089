"""The folder of a delta: streamed into files, described by its metadata, and never half committed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoints import snapshot_of
from tests.support.encodings import any_change, assert_same_changes
from tests.support.faults import FaultyStore, When
from tests.support.tensors import random_bits, rng_of
from tests.support.wire import PUBLICATION_ID, RUN_ID
from vllm_delta_snapshot.changes.decode import decode
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import StoreUnavailable
from vllm_delta_snapshot.format.blocks import EncodedBlock
from vllm_delta_snapshot.format.digest import add_digests, file_digest, format_digest, patch_digest, state_digest
from vllm_delta_snapshot.format.encodings import ENCODINGS, encoding_of
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.runs.delta_folder import DigestedChange, Lineage, WriterNotes, write_delta_folder
from vllm_delta_snapshot.store import Store
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.types import Change, TensorDifference, TensorSpec
from vllm_delta_snapshot.util.ordered import thread_pool

FOLDER = "deltas/00000007-01234567"
SHAPES = [(), (40,), (9, 9), (30, 30), (300,)]
CODES = ["BF16", "F32", "F16", "U8", "I64"]


class Model:
    """Weights before and after a delta, and the changes that lead from one to the other.

    Args:
        encodings: one for each tensor.
        codes: an element type for each.
    """

    def __init__(self, encodings: Iterable[str], codes: Iterable[str] = CODES, *, seed: int = 0) -> None:
        self.before: list[tuple[TensorSpec, Bits]] = []
        self.after: list[tuple[TensorSpec, Bits]] = []
        self.digested: list[DigestedChange] = []
        codes = list(codes)
        for place, name in enumerate(encodings):
            spec = TensorSpec(f"w{place}", SHAPES[place % len(SHAPES)], codes[place % len(codes)])
            self._add(spec, name, random_bits(spec.dtype, spec.numel, place, seed), seed)

    def _add(self, spec: TensorSpec, name: str, bits: Bits, seed: int) -> None:
        change = any_change(encoding_of(name), spec, 0.5, rng_of(spec, name, seed))
        old = bits[change.positions]
        patch = change.resolve(old) if isinstance(change, TensorDifference) else change
        new_bits = bits.copy()
        new_bits[patch.positions] = patch.values
        self.before.append((spec, bits))
        self.after.append((spec, new_bits))
        digests = [patch_digest(spec, patch.positions, values) for values in (old, patch.values)]
        self.digested.append(DigestedChange(change, *digests, name))

    @property
    def changes(self) -> list[Change]:
        return [item.change for item in self.digested]

    @property
    def lineage(self) -> Lineage:
        total = sum(spec.numel for spec, _ in self.before)
        return Lineage(RUN_ID, 7, 6, format_digest(state_digest(self.before)), total)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec, _ in self.before}


def write(
    store: Store,
    model: Model,
    digested: Iterable[DigestedChange] | None = None,
    *,
    notes: Callable[[], WriterNotes] = WriterNotes,
    threads: int = 1,
    keep: Callable[[EncodedBlock], None] | None = None,
    max_file_bytes: int = 10**9,
) -> DeltaMetadata:
    items = iter(model.digested if digested is None else digested)
    with thread_pool(threads) as pool:
        written = write_delta_folder(
            store,
            FOLDER,
            PUBLICATION_ID,
            model.lineage,
            items,
            notes,
            keep=keep,
            pool=pool,
            max_file_bytes=max_file_bytes,
        )
    assert written.data == store.read(f"{FOLDER}/metadata.json", max_bytes=1 << 20)
    assert DeltaMetadata.from_json(written.data, file="f") == written.metadata
    return written.metadata


def assert_reads_back(root: Path, metadata: DeltaMetadata, model: Model) -> None:
    """Check files, changes and digests."""
    folder = root / FOLDER
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["metadata.json", *(f.name for f in metadata.files)]
    )
    for entry in metadata.files:
        path = folder / entry.name
        assert (path.stat().st_size, file_digest(path)) == (entry.bytes, entry.xxh3_128)
    assert_same_changes(decode(metadata, folder, model.specs), model.changes)
    assert metadata.layer_names == tuple(change.spec.name for change in model.changes)
    assert metadata.state_digest == format_digest(state_digest(model.after))


MIXED = [
    "packed",
    "difference",
    "raw",
    "bitmap",
    "dense",
    "raw_difference",
    "bitmap_difference",
    "dense_difference",
] * 3


@pytest.mark.parametrize("name", ENCODINGS)
def test_delta_in_every_encoding_reads_back(tmp_path: Path, name: str):
    model = Model([name] * 10)
    assert_reads_back(tmp_path, write(PosixStore(tmp_path), model), model)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("max_file_bytes", [1, 700, 3000, 10**9])
def test_delta_of_all_encodings_reads_back_from_any_number_of_files(tmp_path: Path, max_file_bytes: int, threads: int):
    model = Model(MIXED)
    metadata = write(PosixStore(tmp_path), model, max_file_bytes=max_file_bytes, threads=threads)
    assert_reads_back(tmp_path, metadata, model)
    assert (len(metadata.files) > 1) == (max_file_bytes < 10**9)


@given(st.lists(st.sampled_from(sorted(ENCODINGS)), max_size=12), st.sampled_from([1, 300, 10**9]), st.integers(0, 99))
def test_any_delta_reads_back(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], max_file_bytes: int, seed: int
):
    model, root = Model(names, seed=seed), tmp_path_factory.mktemp("delta")
    assert_reads_back(root, write(PosixStore(root), model, max_file_bytes=max_file_bytes), model)


def test_several_files_are_numbered_as_they_are_written(tmp_path: Path):
    metadata = write(PosixStore(tmp_path), Model(["raw"] * 6), max_file_bytes=1)
    assert [entry.name for entry in metadata.files] == [f"delta-{n:05d}.safetensors" for n in range(1, 7)]
    assert [entry.file for entry in metadata.tensors] == [0, 1, 2, 3, 4, 5]


def test_only_file_has_the_name_that_openrl_reads(tmp_path: Path):
    assert [entry.name for entry in write(PosixStore(tmp_path), Model(MIXED)).files] == ["delta.safetensors"]


def test_file_passes_the_limit_only_with_a_single_block(tmp_path: Path):
    blocks: list[EncodedBlock] = []
    metadata = write(PosixStore(tmp_path), Model(["raw"] * 20), max_file_bytes=900, keep=blocks.append)
    by_file: dict[int, list[int]] = {}
    for entry, block in zip(metadata.tensors, blocks, strict=True):
        by_file.setdefault(entry.file, []).append(block.num_bytes)
    assert all(sum(sizes) <= 900 or len(sizes) == 1 for sizes in by_file.values())
    assert any(sum(sizes) > 900 for sizes in by_file.values())
    for file, next_file in pairwise(by_file.values()):
        assert sum(file) + next_file[0] > 900


def test_file_is_written_before_the_changes_that_follow_it_are_taken(tmp_path: Path):
    store, model, seen = PosixStore(tmp_path), Model(["raw"] * 5), []

    def digested() -> Iterator[DigestedChange]:
        for item in model.digested:
            seen.append(len(store.list(FOLDER)))
            yield item

    write(store, model, digested(), max_file_bytes=1)
    assert seen == [0, 0, 1, 2, 3]


def test_layer_names_have_the_order_of_the_changes_whichever_block_is_closed_first(tmp_path: Path):
    model = Model(["packed", "raw", "packed", "raw"], ["BF16"])
    metadata = write(PosixStore(tmp_path), model, max_file_bytes=1)
    assert metadata.layer_names == ("w0", "w1", "w2", "w3")
    assert [entry.encoding for entry in metadata.tensors] == ["packed", "raw", "packed", "raw"]
    assert [entry.file for entry in metadata.tensors] == [2, 0, 2, 1]
    assert [entry.block for entry in metadata.tensors] == [0, None, 0, None]


def test_block_of_a_single_tensor_is_not_named(tmp_path: Path):
    model = Model(["packed"] * 4, ["BF16", "F32", "U8", "I64"])
    model.digested = [replace(item, encoding="packed") for item in model.digested if item.change.spec.numel > 80]
    metadata = write(PosixStore(tmp_path), model)
    assert metadata.tensors
    assert all(entry.block is None for entry in metadata.tensors)
    assert b'"block"' not in (tmp_path / FOLDER / "metadata.json").read_bytes()


def test_block_that_became_raw_is_described_as_raw(tmp_path: Path):
    model = Model(["dense"] * 16, ["BF16"])
    model.digested = [replace(item, encoding="packed") for item in model.digested if item.change.spec.numel == 1]
    metadata = write(PosixStore(tmp_path), model)
    assert [(entry.encoding, entry.block) for entry in metadata.tensors] == [("raw", None)] * 4
    assert metadata.format_version == 2


@pytest.mark.parametrize("name", ["raw", "raw_difference"])
def test_change_without_an_encoding_is_not_compressed(tmp_path: Path, name: str):
    model = Model([name] * 5)
    model.digested = [replace(item, encoding=None) for item in model.digested]
    metadata = write(PosixStore(tmp_path), model)
    assert {entry.encoding for entry in metadata.tensors} == {name}
    assert_reads_back(tmp_path, metadata, model)


@pytest.mark.parametrize(
    ("names", "codes", "max_file_bytes", "expected"),
    [
        ([], ["BF16"], 10**9, 2),
        (["raw"] * 3, ["BF16", "F32"], 10**9, 2),
        (["raw"] * 3, ["BF16", "I64"], 10**9, 3),
        (["raw"] * 3, ["BF16"], 1, 3),
        (["raw", "raw_difference"], ["BF16"], 10**9, 3),
        (["raw", "raw", "raw", "packed"], ["BF16"], 10**9, 3),
    ],
)
def test_format_version_says_whether_openrl_can_read_it(
    tmp_path: Path, names: list[str], codes: list[str], max_file_bytes: int, expected: int
):
    metadata = write(PosixStore(tmp_path), Model(names, codes), max_file_bytes=max_file_bytes)
    assert metadata.format_version == expected


@pytest.mark.parametrize("max_file_bytes", [1, 10**9])
def test_empty_delta_is_one_file_and_keeps_the_state(tmp_path: Path, max_file_bytes: int):
    model = Model([])
    metadata = write(PosixStore(tmp_path), model, max_file_bytes=max_file_bytes)
    assert [entry.name for entry in metadata.files] == ["delta.safetensors"]
    assert (metadata.changed_elements, metadata.state_digest) == (0, metadata.base_state_digest)
    assert_reads_back(tmp_path, metadata, model)


def test_unknown_old_values_leave_their_digest_out_and_the_state_the_same(tmp_path: Path):
    model = Model(["raw_difference"] * 5)
    model.digested = [
        replace(item, old_digest=None, new_digest=add_digests(item.new_digest, -(item.old_digest or 0)))
        for item in model.digested
    ]
    metadata = write(PosixStore(tmp_path), model)
    assert [entry.old_digest for entry in metadata.tensors] == [None] * 5
    assert_reads_back(tmp_path, metadata, model)


def test_move_of_a_digest_that_is_negative_is_written_modulo_2_to_64(tmp_path: Path):
    model = Model(["raw_difference"])
    model.digested = [replace(item, old_digest=None, new_digest=-5) for item in model.digested]
    metadata = write(PosixStore(tmp_path), model)
    assert metadata.tensors[0].new_digest == "fffffffffffffffb"
    assert int(metadata.state_digest, 16) == add_digests(int(metadata.base_state_digest, 16), -5)


@pytest.mark.parametrize("threads", [1, 3])
def test_keep_is_told_of_every_change_once(tmp_path: Path, threads: int):
    model, kept = Model(MIXED), []
    metadata = write(PosixStore(tmp_path), model, keep=kept.append, threads=threads, max_file_bytes=500)
    members = sorted((member for block in kept for member in block.members), key=lambda member: member.place)
    assert [member.change for member in members] == model.changes
    assert {m.place: b.encoding for b in kept for m in b.members} == {
        place: entry.encoding for place, entry in enumerate(metadata.tensors)
    }


def test_notes_are_asked_for_when_all_changes_were_taken(tmp_path: Path):
    model, taken = Model(["raw"] * 4), []

    def digested() -> Iterator[DigestedChange]:
        for item in model.digested:
            taken.append(item)
            yield item

    def notes() -> WriterNotes:
        assert len(taken) == 4
        return WriterNotes("base", 3, {"reward": 0.5}, diff_s=1.25)

    metadata = write(PosixStore(tmp_path), model, digested(), notes=notes)
    assert (metadata.base_model, metadata.step, metadata.metrics) == ("base", 3, {"reward": 0.5})
    assert (metadata.timings.diff_s, metadata.timings.upload_s) == (1.25, 0.0)


def test_lineage_and_counts_are_written_down(tmp_path: Path):
    model = Model(MIXED)
    metadata = write(PosixStore(tmp_path), model)
    assert (metadata.run_id, metadata.publication_id) == (RUN_ID, PUBLICATION_ID)
    assert (metadata.version, metadata.base_version) == (7, 6)
    assert metadata.changed_elements == sum(change.changed for change in model.changes)
    assert metadata.total_elements == model.lineage.total_elements
    assert metadata.density_pct == round(100 * metadata.changed_elements / metadata.total_elements, 3)


@pytest.mark.parametrize("max_file_bytes", [1, 700, 10**9])
def test_bytes_are_the_same_with_and_without_threads(tmp_path: Path, max_file_bytes: int):
    written = []
    for threads in (1, 2, 4):
        root = tmp_path / str(threads)
        metadata = write(PosixStore(root), Model(MIXED), threads=threads, max_file_bytes=max_file_bytes)
        files = {name: data for name, data in snapshot_of(root).items() if name.endswith(".safetensors")}
        written.append((files, metadata.files, metadata.tensors, metadata.state_digest))
    assert written[0] == written[1] == written[2]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("good", [0, 3, 15])
def test_nothing_is_described_when_the_changes_fail(tmp_path: Path, threads: int, good: int):
    model = Model(MIXED)

    def digested() -> Iterator[DigestedChange]:
        yield from model.digested[:good]
        raise KeyError("source")

    with pytest.raises(KeyError, match="source"):
        write(PosixStore(tmp_path), model, digested(), threads=threads, max_file_bytes=1)
    assert not (tmp_path / FOLDER / "metadata.json").exists()


def broken_keep(block: EncodedBlock) -> None:
    raise KeyError("keep")


def broken_notes() -> WriterNotes:
    raise KeyError("notes")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("options", [{"keep": broken_keep}, {"notes": broken_notes}], ids=["keep", "notes"])
def test_nothing_is_described_when_a_callback_fails(tmp_path: Path, threads: int, options: dict[str, Callable]):
    with pytest.raises(KeyError):
        write(PosixStore(tmp_path), Model(MIXED), threads=threads, **options)
    assert not (tmp_path / FOLDER / "metadata.json").exists()


@pytest.mark.parametrize("threads", [1, 3])
def test_nothing_is_described_when_encoding_fails(tmp_path: Path, threads: int):
    model = Model(MIXED)
    model.digested[9] = replace(model.digested[9], encoding="packed")  # it is a difference
    with pytest.raises(ValueError, match="packed cannot write"):
        write(PosixStore(tmp_path), model, threads=threads)
    assert not (tmp_path / FOLDER / "metadata.json").exists()


@pytest.mark.parametrize("when", [When.BEFORE, When.TORN])
@pytest.mark.parametrize("threads", [1, 3])
def test_nothing_is_described_when_a_file_is_not_written(tmp_path: Path, when: When, threads: int):
    model = Model(["raw"] * 6)
    for at in range(6):
        root = tmp_path / str(at)
        with pytest.raises(StoreUnavailable):
            write(FaultyStore(PosixStore(root), at, when=when), model, threads=threads, max_file_bytes=1)
        assert not (root / FOLDER / "metadata.json").exists()


def test_changes_are_left_alone(tmp_path: Path):
    model = Model(MIXED)
    arrays = [array for change in model.changes for array in (change.positions, change.values)]
    before = [array.tolist() for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    write(PosixStore(tmp_path), model)
    assert [np.array(array).tolist() for array in arrays] == before
