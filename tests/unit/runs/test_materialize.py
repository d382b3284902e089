"""Materialize: a plain checkpoint at any version, exact or not at all."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import snapshot_of, tiny_tensors, write_checkpoint
from tests.support.faults import FaultyStore
from tests.support.runs import (
    MIXED,
    TinyRun,
    assert_same_state,
    copy_of,
    edit_record,
    forge_difference,
    forge_old_value,
    make_mixed_run,
    make_run,
)
from tests.support.tensors import TORCH_CODES, apply_by_hand, bits_of, random_bits, special_bits, to_torch
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import (
    BaseMismatch,
    BrokenChain,
    CorruptFile,
    ObjectNotFound,
    OutOfOrder,
    SourceError,
    StageError,
    StoreUnavailable,
    VerifyError,
)
from vllm_delta_snapshot.format.encodings import ENCODINGS
from vllm_delta_snapshot.runs.materialize import PROVENANCE_NAME, MaterializeReport, materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.types import TensorSpec


@pytest.fixture(scope="module", params=["difference", "auto"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run of differences, or of both kinds."""
    return make_run(tmp_path_factory.mktemp("run"), 3, encoding=request.param)


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_of(pristine, tmp_path / "run")


def make(run: TinyRun, out: Path, version: int = 3, base: Path | None = None) -> MaterializeReport:
    return materialize(run.folder, Checkpoint(base or run.base), version, out)


def assert_nothing_left(folder: Path, *kept: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(kept)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_checkpoint_at_any_version_has_the_trainers_bits(pristine: TinyRun, tmp_path: Path, version: int):
    make(pristine, tmp_path / "out", version)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert_same_state({n: bits_of(t) for n, t in found.items()}, pristine.history[version])


def test_checkpoint_equals_deltas_applied_by_hand(pristine: TinyRun, tmp_path: Path):
    state = {spec.name: np.array(bits) for spec, bits in Checkpoint(pristine.base).items()}
    for version in (1, 2, 3):
        for change in pristine.changes(version, tmp_path / f"local-{version}"):
            state[change.spec.name] = apply_by_hand(state[change.spec.name], change)
    make(pristine, tmp_path / "out")
    checkpoint = Checkpoint(tmp_path / "out")
    assert_same_state({name: checkpoint.bits(name) for name in checkpoint.specs}, state)


def test_every_version_of_a_run_of_all_encodings_has_the_trainers_bits(tmp_path: Path):
    run = make_mixed_run(tmp_path)
    for version in range(len(MIXED) + 1):
        make(run, tmp_path / f"out-{version}", version)
        found = load_file(tmp_path / f"out-{version}" / "model.safetensors")
        assert_same_state({n: bits_of(t) for n, t in found.items()}, run.history[version])


@pytest.mark.parametrize("encoding", [*ENCODINGS, "auto"])
def test_checkpoint_of_every_type_has_the_trainers_bits(tmp_path: Path, encoding: str):
    specs = {code: TensorSpec(code, special_bits(code).shape, code) for code in TORCH_CODES}
    states = [{code: special_bits(code) for code in specs}]
    states.append({code: random_bits(code, spec.numel) for code, spec in specs.items()})
    one_up = {code: bits + bits.dtype.type(1) for code, bits in states[1].items()}
    states.append(one_up | {"BOOL": 1 - states[1]["BOOL"]})
    states.append({code: np.where(np.arange(bits.size) % 5, bits, ~bits) for code, bits in states[2].items()})
    states[3]["BOOL"] &= 1
    weights = {code: to_torch(bits, specs[code]) for code, bits in states[0].items()}
    base = write_checkpoint(tmp_path / "base", weights)
    publisher = DeltaPublisher(
        weights, sync_dir=str(tmp_path / "run"), base=base, encoding=encoding, asynchronous=False
    )
    for state in states[1:]:
        for code, bits in state.items():
            weights[code].copy_(to_torch(bits, specs[code]))
        publisher.publish()
    for version, state in enumerate(states):
        materialize(RunFolder(PosixStore(tmp_path / "run")), Checkpoint(base), version, tmp_path / f"out-{version}")
        found = load_file(tmp_path / f"out-{version}" / "model.safetensors")
        assert_same_state({n: bits_of(t) for n, t in found.items()}, state)


@pytest.mark.parametrize("encoding", ["raw", "difference"])
def test_version_by_a_trainer_that_remembered_one_element_wrong_is_refused(tmp_path: Path, encoding: str):
    run = make_run(tmp_path, 1)
    name = forge_old_value(run, encoding)
    with pytest.raises((BaseMismatch, VerifyError)) as caught:
        make(run, tmp_path / "out", 2)
    if encoding != "raw":
        assert caught.value.tensor == name
    assert_nothing_left(tmp_path, "base", "run")
    make(run, tmp_path / "out", 1)


def test_difference_that_is_not_the_one_of_its_digests_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path, 1)
    name = forge_difference(run, monkeypatch)
    with pytest.raises(BaseMismatch, match="do not lead") as caught:
        make(run, tmp_path / "out", 2)
    assert caught.value.tensor == name
    assert_nothing_left(tmp_path, "base", "run")


def test_sharded_base_gives_the_same_shards(tmp_path: Path):
    run = make_run(tmp_path, 2)
    base = write_checkpoint(tmp_path / "sharded", tiny_tensors(), shards=3)
    make(run, tmp_path / "out", 2, base)
    names = [path.name for path in base.iterdir()]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*names, PROVENANCE_NAME])
    checkpoint = Checkpoint(tmp_path / "out")
    assert_same_state({name: checkpoint.bits(name) for name in checkpoint.specs}, run.history[2])


def test_headers_of_the_base_are_kept(pristine: TinyRun, tmp_path: Path):
    make(pristine, tmp_path / "out")
    base, made = (Checkpoint(folder).files[0] for folder in (pristine.base, tmp_path / "out"))
    assert made.metadata == base.metadata == {"format": "pt"}
    assert [made.offset(n) for n in base.specs] == [base.offset(n) for n in base.specs]


def test_other_files_of_the_base_are_copied(pristine: TinyRun, tmp_path: Path):
    make(pristine, tmp_path / "out")
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (pristine.base / name).read_bytes()


def test_other_weights_of_the_base_are_left_out(pristine: TinyRun, tmp_path: Path):
    base = write_checkpoint(tmp_path / "base", tiny_tensors())
    for name in ("consolidated.safetensors", "pytorch_model.bin", "model.gguf", "optimizer.pt"):
        (base / name).write_bytes(b"stale")
    make(pristine, tmp_path / "out", 3, base)
    kept = {"config.json", "tokenizer.json", "model.safetensors", PROVENANCE_NAME}
    assert set(snapshot_of(tmp_path / "out")) == kept


def test_base_of_symbolic_links_gives_plain_files(pristine: TinyRun, tmp_path: Path):
    base = tmp_path / "links"
    base.mkdir()
    for path in pristine.base.iterdir():
        (base / path.name).symlink_to(path)
    before = snapshot_of(pristine.base)
    make(pristine, tmp_path / "out", 3, base)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert snapshot_of(pristine.base) == before


def test_base_is_not_touched(pristine: TinyRun, tmp_path: Path):
    before = snapshot_of(pristine.base)
    make(pristine, tmp_path / "out")
    assert snapshot_of(pristine.base) == before


def test_report_and_provenance_say_what_was_made(pristine: TinyRun, tmp_path: Path):
    report = make(pristine, tmp_path / "out")
    assert report.state_digest == Checkpoint(tmp_path / "out").state_digest == pristine.publisher.state_digest
    assert (report.version, report.run_id) == (3, pristine.publisher.run_id)
    assert report.changed_elements == sum(pristine.metadata(v).changed_elements for v in (1, 2, 3))
    provenance = json.loads((tmp_path / "out" / PROVENANCE_NAME).read_text())
    assert provenance == {
        "run_id": report.run_id, "version": 3, "state_digest": report.state_digest
    }  # fmt: skip


def test_progress_is_told_after_every_version(pristine: TinyRun, tmp_path: Path):
    told: list[tuple[int, int]] = []
    materialize(
        pristine.folder, Checkpoint(pristine.base), 3, tmp_path / "out", progress=lambda *args: told.append(args)
    )
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_output_that_is_an_empty_folder_is_used(pristine: TinyRun, tmp_path: Path):
    (tmp_path / "out").mkdir()
    make(pristine, tmp_path / "out")
    assert Checkpoint(tmp_path / "out").state_digest == pristine.publisher.state_digest


def test_output_in_a_folder_that_is_missing_is_made(pristine: TinyRun, tmp_path: Path):
    make(pristine, tmp_path / "not" / "yet" / "out")
    assert_nothing_left(tmp_path / "not" / "yet", "out")


def test_output_that_is_not_empty_is_refused_and_kept(pristine: TinyRun, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(StageError, match="not an empty folder"):
        make(pristine, tmp_path / "out")
    assert snapshot_of(tmp_path) == {"out/mine": b"precious"}


def test_output_that_is_a_file_is_refused_and_kept(pristine: TinyRun, tmp_path: Path):
    (tmp_path / "out").write_text("precious")
    with pytest.raises(StageError):
        make(pristine, tmp_path / "out")
    assert snapshot_of(tmp_path) == {"out": b"precious"}


def test_output_that_cannot_be_made_is_a_stage_error(pristine: TinyRun, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StageError):
        make(pristine, tmp_path / "file" / "out")


def test_base_with_other_bits_is_a_base_mismatch(pristine: TinyRun, tmp_path: Path):
    other = write_checkpoint(tmp_path / "other", tiny_tensors(seed=1))
    with pytest.raises(BaseMismatch) as caught:
        make(pristine, tmp_path / "out", 3, other)
    assert caught.value.file == str(other)
    assert_nothing_left(tmp_path, "other")


def test_base_with_one_other_bit_is_a_base_mismatch(pristine: TinyRun, tmp_path: Path):
    path = write_checkpoint(tmp_path / "other", tiny_tensors()) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BaseMismatch):
        make(pristine, tmp_path / "out", 3, tmp_path / "other")


def test_base_with_other_tensors_is_a_source_error(pristine: TinyRun, tmp_path: Path):
    other = write_checkpoint(tmp_path / "other", {"a": torch.zeros(3)})
    with pytest.raises(SourceError, match="does not fit run"):
        make(pristine, tmp_path / "out", 3, other)


def test_version_that_is_not_published_is_a_broken_chain(pristine: TinyRun, tmp_path: Path):
    with pytest.raises(BrokenChain):
        make(pristine, tmp_path / "out", 4)
    assert_nothing_left(tmp_path)


def test_version_below_the_base_is_out_of_order(pristine: TinyRun, tmp_path: Path):
    with pytest.raises(OutOfOrder):
        make(pristine, tmp_path / "out", -1)


def test_version_whose_record_is_gone_is_a_broken_chain(run: TinyRun, tmp_path: Path):
    (run.sync_dir / "versions" / "00000002.json").unlink()
    with pytest.raises(BrokenChain, match="missing: 2"):
        make(run, tmp_path / "out")


def test_version_made_against_other_weights_is_a_base_mismatch(run: TinyRun, tmp_path: Path):
    edit_record(run, 2, base_state_digest="0" * 16)
    with pytest.raises(BaseMismatch):
        make(run, tmp_path / "out")
    assert_nothing_left(tmp_path, "run")


@pytest.mark.parametrize("version", [1, 2, 3])
def test_payload_that_was_tampered_with_is_corrupt_and_nothing_is_left(run: TinyRun, tmp_path: Path, version: int):
    path = run.payload(version)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFile) as caught:
        make(run, tmp_path / "out")
    assert caught.value.file == str(path)
    assert_nothing_left(tmp_path, "run")


def test_base_that_changes_under_the_work_is_a_verify_error_and_nothing_is_left(pristine: TinyRun, tmp_path: Path):
    path = write_checkpoint(tmp_path / "base", tiny_tensors()) / "model.safetensors"
    base = Checkpoint(tmp_path / "base")
    assert base.state_digest == pristine.folder.read_run().base.state_digest
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(VerifyError, match="version 3 came out with other weights"):
        materialize(pristine.folder, base, 3, tmp_path / "out")
    assert_nothing_left(tmp_path, "base")


def test_store_that_fails_at_any_operation_leaves_nothing(pristine: TinyRun, tmp_path: Path):
    counting = FaultyStore(PosixStore(pristine.sync_dir))
    materialize(RunFolder(counting), Checkpoint(pristine.base), 3, tmp_path / "good")
    base = Checkpoint(pristine.base)
    for at in range(len(counting.log)):
        with pytest.raises(StoreUnavailable):
            materialize(RunFolder(FaultyStore(PosixStore(pristine.sync_dir), at)), base, 3, tmp_path / "out")
        assert_nothing_left(tmp_path, "good")


def test_missing_run_is_not_found(pristine: TinyRun, tmp_path: Path):
    with pytest.raises(ObjectNotFound):
        make(replace(pristine, sync_dir=tmp_path / "none"), tmp_path / "out")


def test_output_that_is_the_current_empty_folder_is_used(
    pristine: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    make(pristine, Path())
    assert Checkpoint(tmp_path / "out").state_digest == pristine.publisher.state_digest


def test_output_that_is_a_link_to_an_empty_folder_is_used(pristine: TinyRun, tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    make(pristine, tmp_path / "out")
    assert Checkpoint(tmp_path / "real").state_digest == pristine.publisher.state_digest


def test_output_that_is_the_root_is_refused(pristine: TinyRun):
    with pytest.raises(StageError, match="not an empty folder"):
        make(pristine, Path("/"))
