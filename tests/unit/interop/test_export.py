"""Export: versions of a run, or of a SkyRL chain, as OpenRL's folders: exact by OpenRL's own rules, or refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints import snapshot_of, tiny_tensors, write_checkpoint
from tests.support.floats import FLOAT_SPECS, FloatRun, make_float_run
from tests.support.openrl import check_openrl_delta
from tests.support.runs import State, assert_same_state, make_run
from tests.support.skyrl import changed_between, make_skyrl_run, write_skyrl_delta
from tests.support.tensors import bits_of, patch_of, to_torch
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import (
    BaseMismatch,
    BrokenChain,
    CorruptFile,
    OutOfOrder,
    SourceError,
    StageError,
    UnsupportedFormat,
)
from vllm_delta_snapshot.format.openrl_write import is_openrl_tensor, plan_openrl_delta
from vllm_delta_snapshot.interop.chain import find_chain
from vllm_delta_snapshot.interop.export import ExportReport, export_chain, export_run
from vllm_delta_snapshot.interop.openrl import read_openrl_delta
from vllm_delta_snapshot.interop.verify import verify_chain
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.types import TensorSpec

ENCODINGS = ["raw", "difference", "packed", "auto", "raw_difference", "absolute"]
SPECS = {spec.name: spec for spec in FLOAT_SPECS}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> FloatRun:
    return make_float_run(tmp_path_factory.mktemp("run"), ENCODINGS)


def no_base() -> Checkpoint:
    raise AssertionError("the base checkpoint was asked for")


def export(run: FloatRun, out: Path, after: int, version: int) -> ExportReport:
    return export_run(run.folder, out, after=after, version=version, find_base=lambda: Checkpoint(run.base))


def assert_leads(folder: Path, before: State, after: State) -> None:
    """Check a folder by the rules of OpenRL's reader, by ours, and that it leads from one state to another."""
    by_rules = check_openrl_delta(folder)
    _, patches = read_openrl_delta(folder, SPECS)
    assert [patch.spec.name for patch in patches] == list(by_rules)
    state = {name: bits.copy() for name, bits in before.items()}
    for patch in patches:
        indices, values = by_rules[patch.spec.name]
        assert (patch.positions.tolist(), patch.values.tolist()) == (indices.tolist(), bits_of(values).tolist())
        state[patch.spec.name][patch.positions] = patch.values
    assert_same_state(state, after)


@pytest.mark.parametrize("version", range(1, len(ENCODINGS) + 1))
def test_each_version_in_each_encoding_is_exported_exactly(pristine: FloatRun, tmp_path: Path, version: int):
    report = export(pristine, tmp_path / "out", version - 1, version)
    before, after = pristine.history[version - 1], pristine.history[version]
    assert_leads(tmp_path / "out", before, after)
    changed = changed_between(before, after)
    assert {name: indices.tolist() for name, (indices, _) in check_openrl_delta(tmp_path / "out").items()} == changed
    assert report == ExportReport(
        folder=str(tmp_path / "out"),
        base_version=version - 1,
        version=version,
        changed_tensors=len(changed),
        changed_elements=sum(map(len, changed.values())),
        payload_bytes=(tmp_path / "out" / "delta.safetensors").stat().st_size,
    )


def test_output_that_is_the_current_empty_folder_is_used(
    pristine: FloatRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    assert export(pristine, Path(), 0, 1).folder == str(tmp_path / "out")
    assert_leads(tmp_path / "out", pristine.history[0], pristine.history[1])


@pytest.mark.parametrize(("after", "version"), [(0, 6), (0, 2), (1, 4), (2, 6), (3, 5)])
def test_several_versions_are_exported_as_one(pristine: FloatRun, tmp_path: Path, after: int, version: int):
    export(pristine, tmp_path / "out", after, version)
    assert_leads(tmp_path / "out", pristine.history[after], pristine.history[version])


def test_exports_one_by_one_verify_as_a_chain(pristine: FloatRun, tmp_path: Path):
    for version in range(1, len(ENCODINGS) + 1):
        export(pristine, tmp_path / f"{version}", version - 1, version)
    chain = find_chain([tmp_path / f"{version}" for version in range(1, len(ENCODINGS) + 1)])
    assert verify_chain(chain, Checkpoint(pristine.base)).is_ok


def test_export_holds_what_openrl_describes_and_no_more(pristine: FloatRun, tmp_path: Path):
    export(pristine, tmp_path / "out", 0, 1)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["delta.safetensors", "metadata.json"]
    metadata = json.loads((tmp_path / "out" / "metadata.json").read_text())
    fields = "base_model changed_elements created_at density_pct format format_version kind layer_names layer_shapes"
    assert sorted(metadata) == [*fields.split(), "model_id", "timestamp", "total_elements"]
    assert (metadata["kind"], metadata["base_model"]) == ("sampler", str(pristine.base))
    assert metadata["model_id"] == f"{pristine.publisher.run_id}@1"
    assert metadata["total_elements"] == sum(spec.numel for spec in FLOAT_SPECS)


def test_export_of_absolute_values_asks_for_no_base(pristine: FloatRun, tmp_path: Path):
    for version in (1, 3, 6):
        export_run(
            pristine.folder, tmp_path / f"{version}", after=version - 1, version=version, find_base=no_base
        )  # fmt: skip
        assert_leads(tmp_path / f"{version}", pristine.history[version - 1], pristine.history[version])


def test_export_of_differences_asks_for_the_base_and_tells_its_progress(pristine: FloatRun, tmp_path: Path):
    told: list[tuple[int, int]] = []
    export_run(
        pristine.folder,
        tmp_path / "out",
        after=1,
        version=2,
        find_base=lambda: Checkpoint(pristine.base),
        progress=lambda *args: told.append(args),
    )
    assert told == [(1, 2), (2, 2)]


def test_export_of_nothing_is_an_empty_delta(tmp_path: Path):
    run = make_float_run(tmp_path, ["raw"])
    run.publisher.publish()
    report = export_run(run.folder, tmp_path / "out", after=1, version=2, find_base=no_base)
    assert check_openrl_delta(tmp_path / "out") == {}
    assert (report.changed_tensors, report.changed_elements) == (0, 0)


def test_export_of_differences_that_add_up_to_nothing_is_empty(tmp_path: Path):
    base = {"w": torch.arange(6, dtype=torch.bfloat16)}
    weights = {"w": base["w"].clone()}
    publisher = DeltaPublisher(
        weights,
        sync_dir=str(tmp_path / "run"),
        base=write_checkpoint(tmp_path / "base", base),
        encoding="raw_difference",
        asynchronous=False,
    )
    for sign in (1, -1):
        weights["w"].view(torch.int16)[2] += sign
        publisher.publish()
    folder = RunFolder(PosixStore(tmp_path / "run"))
    export_run(folder, tmp_path / "out", after=0, version=2, find_base=no_base)
    assert check_openrl_delta(tmp_path / "out") == {}


def test_odd_bits_are_exported_as_they_are(tmp_path: Path):
    spec = TensorSpec("w", (4,), "BF16")
    base = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    odd = np.array([0x8000, 0x7FC1, 0xFF80, 0x0001], np.uint16)
    publisher = DeltaPublisher(
        {"w": to_torch(odd, spec)},
        sync_dir=str(tmp_path / "run"),
        base=write_checkpoint(tmp_path / "base", base),
        encoding="difference",
        asynchronous=False,
    )
    publisher.publish()
    folder = RunFolder(PosixStore(tmp_path / "run"))
    export_run(folder, tmp_path / "out", after=0, version=1, find_base=lambda: Checkpoint(tmp_path / "base"))
    assert bits_of(check_openrl_delta(tmp_path / "out")["w"][1]).tolist() == odd.tolist()


def test_run_and_base_are_not_touched(pristine: FloatRun, tmp_path: Path):
    before = snapshot_of(pristine.sync_dir), snapshot_of(pristine.base)
    export(pristine, tmp_path / "out", 0, 6)
    assert (snapshot_of(pristine.sync_dir), snapshot_of(pristine.base)) == before


# --- what is refused


def assert_nothing_left(folder: Path, *kept: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(kept)


@pytest.mark.parametrize("code", ["BOOL", "U8", "I8", "I64", "U16", "C64"])
def test_tensor_that_is_not_of_floating_point_is_refused_by_name(code: str):
    spec = TensorSpec("model.count", (3,), code)
    patches = [patch_of(TensorSpec("w", (2,), "BF16"), {0: 1}), patch_of(spec, {1: 1})]
    with pytest.raises(UnsupportedFormat, match="cannot hold this tensor") as caught:
        plan_openrl_delta(patches, total_elements=5, base_model=None, model_id=None)
    assert (caught.value.tensor, caught.value.found) == ("model.count", f"{code}[3]")
    assert "materialize" in str(caught.value.hint)


def test_tensor_types_that_are_taken_are_those_that_torch_calls_floating_point():
    for code in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F16", "BF16", "F32", "F64", "C64", "I32", "BOOL"):
        spec = TensorSpec("w", (), code)
        assert is_openrl_tensor(spec) is getattr(torch, spec.element.torch_name).is_floating_point


def test_tensor_that_is_refused_but_does_not_change_is_left_out():
    empty = patch_of(TensorSpec("model.count", (3,), "I64"), {})
    planned = plan_openrl_delta([empty], total_elements=3, base_model=None, model_id=None)
    assert planned.metadata.layer_names == ()


def test_version_with_integers_is_refused_and_nothing_is_left(tmp_path: Path):
    run = make_run(tmp_path, 2)
    kept = [path.name for path in tmp_path.iterdir()]
    with pytest.raises(UnsupportedFormat) as caught:
        export_run(
            run.folder, tmp_path / "out", after=0, version=2, find_base=lambda: Checkpoint(run.base)
        )  # fmt: skip
    assert caught.value.tensor == "model.layers.0.step"
    assert_nothing_left(tmp_path, *kept)


@pytest.mark.parametrize(("after", "version"), [(0, 0), (2, 2), (3, 2), (6, 1)])
def test_versions_that_do_not_lead_on_are_out_of_order(pristine: FloatRun, tmp_path: Path, after: int, version: int):
    with pytest.raises(OutOfOrder, match="leads to a later version") as caught:
        export(pristine, tmp_path / "out", after, version)
    assert "--from" in str(caught.value.hint)
    assert_nothing_left(tmp_path)


def test_version_that_is_not_published_is_a_broken_chain(pristine: FloatRun, tmp_path: Path):
    with pytest.raises(BrokenChain):
        export(pristine, tmp_path / "out", 6, 7)
    assert_nothing_left(tmp_path)


def test_base_with_other_bits_is_a_base_mismatch(pristine: FloatRun, tmp_path: Path):
    other = {spec.name: to_torch(np.zeros(spec.numel, spec.element.bits), spec) for spec in FLOAT_SPECS}
    base = write_checkpoint(tmp_path / "other", other)
    with pytest.raises(BaseMismatch) as caught:
        export_run(
            pristine.folder, tmp_path / "out", after=1, version=2, find_base=lambda: Checkpoint(base)
        )  # fmt: skip
    assert caught.value.file == str(base)
    assert_nothing_left(tmp_path, "other")


def test_base_with_other_tensors_is_a_source_error(pristine: FloatRun, tmp_path: Path):
    base = write_checkpoint(tmp_path / "other", tiny_tensors())
    with pytest.raises(SourceError):
        export_run(
            pristine.folder, tmp_path / "out", after=1, version=2, find_base=lambda: Checkpoint(base)
        )  # fmt: skip


@pytest.mark.parametrize("version", [1, 2])
def test_damaged_version_on_the_way_leaves_nothing(tmp_path: Path, version: int):
    run = make_float_run(tmp_path, ["raw", "difference"])
    metadata = run.folder.read_metadata(run.folder.read_version(version))
    path = run.sync_dir / run.folder.read_version(version).folder / metadata.files[0].name
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(CorruptFile):
        export(run, tmp_path / "out", 1, 2)
    assert_nothing_left(tmp_path, "base", "run")


def test_output_that_is_in_use_is_refused_and_kept(pristine: FloatRun, tmp_path: Path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(StageError, match="not an empty folder"):
        export(pristine, tmp_path, 0, 1)
    assert snapshot_of(tmp_path) == {"mine": b"precious"}


# --- from SkyRL


def make_float_chain(folder: Path, versions: int = 4) -> tuple[Checkpoint, Path, list[State]]:
    """Write a SkyRL chain of floating point weights."""
    run = make_float_run(folder / "source", ["raw"] * versions)
    for version in range(1, versions + 1):
        pair = [
            {spec.name: to_torch(run.history[v][spec.name], spec) for spec in FLOAT_SPECS}
            for v in (version - 1, version)
        ]
        write_skyrl_delta(folder / "sync" / f"delta-{version:08d}", *pair, version=version)
    return Checkpoint(run.base), folder / "sync", run.history


@pytest.mark.parametrize(("after", "version"), [(0, 1), (3, 4), (0, 4), (1, 3)])
def test_skyrl_versions_are_exported_exactly(tmp_path: Path, after: int, version: int):
    base, sync_dir, history = make_float_chain(tmp_path)
    report = export_chain(find_chain([sync_dir], version=version), base, tmp_path / "out", after=after)
    assert_leads(tmp_path / "out", history[after], history[version])
    assert (report.base_version, report.version) == (after, version)


def test_skyrl_deltas_that_start_later_are_exported_from_there(tmp_path: Path):
    base, sync_dir, _ = make_float_chain(tmp_path)
    chain = find_chain([sync_dir / "delta-00000003", sync_dir / "delta-00000004"])
    with pytest.raises(OutOfOrder, match="starts later"):
        export_chain(chain, base, tmp_path / "out", after=1)
    with pytest.raises(OutOfOrder, match="leads to a later version"):
        export_chain(chain, base, tmp_path / "out", after=4)


def test_skyrl_version_with_integers_is_refused(tmp_path: Path):
    run = make_skyrl_run(tmp_path, 2)
    with pytest.raises(UnsupportedFormat):
        export_chain(find_chain([run.sync_dir]), Checkpoint(run.base), tmp_path / "out", after=1)
    assert not (tmp_path / "out").exists()
