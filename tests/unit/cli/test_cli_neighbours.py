"""The command line on deltas of SkyRL and OpenRL, and ``export``: documented fields, bits, and what goes wrong."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import snapshot_of, tiny_tensors, write_checkpoint
from tests.support.cli import ERROR_FIELDS, Outcome, documented_fields, fields_of
from tests.support.floats import FloatRun, make_float_run
from tests.support.openrl import check_openrl_delta, write_openrl_delta
from tests.support.runs import TinyRun, assert_same_state, make_run
from tests.support.skyrl import SkyRLRun, edit_manifest, edit_tensor, make_skyrl_run
from vllm_delta_snapshot.checkpoint import Checkpoint

forms = pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
FILE = "delta-rank00000-file000000.safetensors"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> SkyRLRun:
    return make_skyrl_run(tmp_path_factory.mktemp("skyrl"), 3)


@pytest.fixture
def run(pristine: SkyRLRun, tmp_path: Path) -> SkyRLRun:
    return replace(pristine, sync_dir=Path(shutil.copytree(pristine.sync_dir, tmp_path / "sync")))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("ours"), 1)


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> FloatRun:
    return make_float_run(tmp_path_factory.mktemp("floats"), ["raw", "difference", "raw"])


@pytest.fixture(scope="module")
def openrl(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("openrl")
    return [
        write_openrl_delta(folder / f"sampler-{n}", {"model.norm.weight": ([1], torch.tensor([float(n)]), [8])})
        for n in (2, 1)
    ]


# --- inspect


def test_inspect_of_a_skyrl_delta_has_the_documented_fields(pristine: SkyRLRun):
    outcome = Outcome("inspect", pristine.delta(2), "--json")
    outcome.assert_ok()
    found = outcome.json
    assert fields_of(found) == documented_fields("`inspect` of a SkyRL delta") | {"ok"}
    assert (found["kind"], found["version"], found["base_version"]) == ("SkyRL delta", 2, 1)
    assert found["checksums"] == ["xxh3-128"]
    assert found["files"] == [{"name": FILE, "bytes": (pristine.delta(2) / FILE).stat().st_size}]
    assert found["payload_bytes"] == found["files"][0]["bytes"]
    assert found["changed_elements"] == sum(tensor["changed"] for tensor in found["tensors"]) > 0
    assert found["folder"] == str(pristine.delta(2))
    assert found["tensors"][0] == {
        "name": "model.embed.weight",
        "dtype": "BF16",
        "shape": [13, 8],
        "changed": 10,
        "encoding": "xor, zstd",
    }


def test_inspect_of_a_skyrl_version_is_that_of_its_folder(pristine: SkyRLRun):
    for target in (f"{pristine.sync_dir}@2", f"file://{pristine.sync_dir}@2"):
        assert Outcome("inspect", target, "--json").json == Outcome("inspect", pristine.delta(2), "--json").json


def test_inspect_of_a_skyrl_delta_is_readable(pristine: SkyRLRun):
    outcome = Outcome("inspect", pristine.delta(2))
    outcome.assert_ok()
    lines = outcome.stdout.splitlines()
    assert lines[0].split(maxsplit=1) == ["kind", "SkyRL delta"]
    assert any(line.startswith("model.layers.0.step") and "scalar" in line and "100.000 %" in line for line in lines)


def test_inspect_of_a_skyrl_sync_dir_has_the_documented_fields(run: SkyRLRun):
    shutil.rmtree(run.delta(2))
    outcome = Outcome("inspect", run.sync_dir, "--json")
    outcome.assert_ok()
    found = outcome.json
    assert fields_of(found) == documented_fields("`inspect` of a SkyRL sync_dir") | {"ok"}
    assert (found["kind"], found["num_versions"], found["newest_version"]) == ("SkyRL sync_dir", 2, 3)
    assert found["missing"] == [[2, 2]]
    assert [(v["version"], v["base_version"]) for v in found["versions"]] == [(1, 0), (3, 2)]
    assert found["compressed_bytes"] == sum(version["compressed_bytes"] for version in found["versions"])


def test_inspect_of_a_skyrl_sync_dir_names_every_gap(run: SkyRLRun):
    far = run.sync_dir / "delta-99999999"
    run.delta(3).rename(far)
    edit_manifest(far, version=99999999)
    shutil.rmtree(run.delta(1))
    assert Outcome("inspect", run.sync_dir, "--json").json["missing"] == [[1, 1], [3, 99999998]]
    assert "1, 3 to 99999998\n" in Outcome("inspect", run.sync_dir).stdout
    message = Outcome("verify", run.sync_dir, "--base", run.base).assert_failed(1, "BrokenChain")
    assert "missing: 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, ..." in message


def test_inspect_of_a_skyrl_sync_dir_is_readable(pristine: SkyRLRun):
    outcome = Outcome("inspect", pristine.sync_dir)
    outcome.assert_ok()
    title, *versions = outcome.stdout.splitlines()[-4:]
    assert title.split()[:3] == ["version", "base", "tensors"]
    assert [line.split()[:2] for line in versions] == [["1", "0"], ["2", "1"], ["3", "2"]]


@forms
def test_inspect_of_a_skyrl_version_that_is_missing_says_so(form: tuple[str, ...], pristine: SkyRLRun):
    message = Outcome("inspect", f"{pristine.sync_dir}@9", *form).assert_failed(1, "ObjectNotFound")
    assert "delta-00000009" in message


@forms
def test_inspect_of_a_damaged_skyrl_delta_is_a_problem(form: tuple[str, ...], run: SkyRLRun):
    edit_tensor(run.delta(1), 0, dtype="bfloat17")
    Outcome("inspect", run.delta(1), *form).assert_failed(1, "UnsupportedFormat")
    Outcome("inspect", run.sync_dir, *form).assert_failed(1, "UnsupportedFormat")


# --- verify


def test_verify_of_a_skyrl_sync_dir_has_the_documented_fields(pristine: SkyRLRun):
    outcome = Outcome("verify", pristine.sync_dir, "--base", pristine.base, "--json")
    outcome.assert_ok()
    found = outcome.json
    assert set(found) == documented_fields("`verify --base`") - {"version", "folder"} | {"ok"}  # those are of problems
    assert found | {"payload_bytes": 0, "changed_elements": 0} == {
        "ok": True,
        "kind": "SkyRL delta",
        "base": str(pristine.base),
        "deltas": 3,
        "newest_version": 3,
        "payload_bytes": 0,
        "changed_elements": 0,
        "problems": [],
        "not_checked": [],
    }


def test_verify_of_foreign_deltas_is_readable(pristine: SkyRLRun, openrl: list[Path]):
    outcome = Outcome("verify", f"{pristine.sync_dir}@2", "--base", pristine.base)
    outcome.assert_ok()
    assert outcome.stdout.startswith("ok: 2 deltas (SkyRL delta, newest version 2), ")
    outcome = Outcome("verify", *openrl, "--base", pristine.base)
    outcome.assert_ok()
    *notes, verdict = outcome.stdout.splitlines()
    assert len(notes) == 3
    assert all(note.startswith("not checked: ") for note in notes)
    assert verdict.startswith("ok: 2 deltas (OpenRL sparse_delta), ")


def test_verify_of_skyrl_deltas_in_order_starts_where_they_start(pristine: SkyRLRun, tmp_path: Path):
    Outcome("materialize", f"{pristine.sync_dir}@1", tmp_path / "one", "--base", pristine.base).assert_ok()
    Outcome("verify", pristine.delta(2), pristine.delta(3), "--base", tmp_path / "one").assert_ok()
    assert Outcome("verify", pristine.delta(2), pristine.delta(3), "--base", pristine.base).code == 1


def test_verify_finds_damage_in_foreign_deltas_and_exits_with_1(run: SkyRLRun):
    edit_tensor(run.delta(1), 0, checksum="0" * 32)
    (run.delta(2) / FILE).write_bytes(b"")
    outcome = Outcome("verify", run.sync_dir, "--base", run.base, "--json")
    assert (outcome.code, outcome.stderr) == (1, "")
    assert outcome.json["ok"] is False
    found = [(p["version"], p["folder"], p["kind"]) for p in outcome.json["problems"]]
    assert found == [(version, str(run.delta(version)), "CorruptFile") for version in (1, 2)]
    assert all(set(problem) == ERROR_FIELDS | {"version", "folder"} for problem in outcome.json["problems"])
    text = Outcome("verify", run.sync_dir, "--base", run.base)
    assert text.code == 1
    assert [line.split(":")[0] for line in text.stdout.splitlines()][:2] == ["version 1", "version 2"]
    assert text.stdout.splitlines()[-1] == "NOT ok: 2 of 3 deltas damaged (SkyRL delta, newest version 3)"


@forms
def test_verify_of_a_chain_with_a_gap_says_which_is_missing(form: tuple[str, ...], run: SkyRLRun):
    shutil.rmtree(run.delta(2))
    message = Outcome("verify", run.sync_dir, "--base", run.base, *form).assert_failed(1, "BrokenChain")
    assert "missing: 2" in message


def test_verify_of_a_run_takes_no_base(ours: TinyRun):
    assert "a run is verified without it" in Outcome("verify", ours.sync_dir, "--base", ours.base).usage
    assert "--server goes without --base" in Outcome("verify", "--server", "http://h:1", "--base", ours.base).usage


# --- materialize


@pytest.mark.parametrize(("suffix", "version"), [("", 3), ("@3", 3), ("@1", 1), ("@0", 0)])
def test_materialize_of_a_skyrl_sync_dir_has_the_documented_fields_and_the_bits(
    pristine: SkyRLRun, tmp_path: Path, suffix: str, version: int
):
    outcome = Outcome(
        "materialize", f"{pristine.sync_dir}{suffix}", tmp_path / "out", "--base", pristine.base, "--json"
    )
    outcome.assert_ok()
    found = outcome.json
    assert set(found) == documented_fields("`materialize --base` of other tools' deltas") | {"ok"}
    checkpoint = Checkpoint(tmp_path / "out")
    assert (found["ok"], found["version"], found["folder"]) == (True, version, str(tmp_path / "out"))
    assert found["state_digest"] == checkpoint.state_digest
    assert_same_state({name: checkpoint.bits(name) for name in checkpoint.specs}, pristine.history[version])


def test_materialize_of_deltas_in_order_says_what_was_applied(pristine: SkyRLRun, openrl: list[Path], tmp_path: Path):
    outcome = Outcome("materialize", *openrl, tmp_path / "openrl", "--base", pristine.base)
    outcome.assert_ok()
    checkpoint = Checkpoint(tmp_path / "openrl")
    assert checkpoint.bits("model.norm.weight")[1] == 0x3F800000  # 1.0, of the last one given
    what = "2 deltas applied (OpenRL sparse_delta)"
    assert outcome.stdout == f"{tmp_path}/openrl: {what}, digest {checkpoint.state_digest}\n"
    outcome = Outcome("materialize", pristine.delta(1), tmp_path / "skyrl", "--base", pristine.base)
    outcome.assert_ok()
    assert "1 deltas applied (SkyRL delta, version 1)" in outcome.stdout


@forms
@pytest.mark.parametrize("verb", ["verify", "materialize", "export"])
def test_foreign_deltas_without_a_base_ask_for_it(verb: str, form: tuple[str, ...], pristine: SkyRLRun, tmp_path: Path):
    out = () if verb == "verify" else (tmp_path / "out",)
    outcome = Outcome(verb, pristine.sync_dir, *out, *form)
    message = outcome.assert_failed(2, "ObjectNotFound")
    assert bool(outcome.stdout) == bool(form)
    command = " ".join(map(str, (verb, pristine.sync_dir, *out)))
    assert f"delta-snapshot {command} --base FOLDER" in message
    assert snapshot_of(tmp_path) == {}


@forms
@pytest.mark.parametrize(
    ("args", "kind"),
    [
        (("{sync}@9", "{tmp}/out", "--base", "{base}"), "BrokenChain"),
        (("{sync}", "{tmp}/out", "--base", "{tmp}/none"), "ObjectNotFound"),
        (("{sync}", "{tmp}/out", "--base", "{tmp}/other"), "CorruptFile"),
        (("{sync}", "{tmp}", "--base", "{base}"), "StageError"),
        (("{sync}/delta-00000002", "{sync}/delta-00000001", "{tmp}/out", "--base", "{base}"), "BrokenChain"),
        (("{sync}/delta-00000001", "{tmp}/other", "{tmp}/out", "--base", "{base}"), "ObjectNotFound"),
        (("{sync}", "{ours}", "{tmp}/out", "--base", "{base}"), "CorruptFile"),
    ],
    ids=["version", "base", "other-base", "output", "order", "no-delta", "ours"],
)
def test_materialize_of_foreign_deltas_that_fails_leaves_nothing(
    pristine: SkyRLRun, ours: TinyRun, tmp_path: Path, args: tuple[str, ...], kind: str, form: tuple[str, ...]
):
    write_checkpoint(tmp_path / "other", tiny_tensors(seed=1))
    before = snapshot_of(tmp_path)
    places = {"sync": pristine.sync_dir, "base": pristine.base, "tmp": tmp_path, "ours": ours.sync_dir}
    outcome = Outcome("materialize", *(arg.format(**places) for arg in args), *form)
    outcome.assert_failed(1, kind)
    assert bool(outcome.stdout) == bool(form)
    assert snapshot_of(tmp_path) == before


def test_folder_whose_name_ends_like_a_version_is_taken_by_its_name(pristine: SkyRLRun, tmp_path: Path):
    shutil.copytree(pristine.sync_dir, tmp_path / "sync@2")
    outcome = Outcome("verify", tmp_path / "sync@2", "--base", pristine.base, "--json")
    assert outcome.json["newest_version"] == 3


# --- export


def test_export_has_the_documented_fields_and_the_bits(floats: FloatRun, tmp_path: Path):
    outcome = Outcome("export", f"{floats.sync_dir}@2", tmp_path / "out", "--format", "openrl-v2", "--json")
    outcome.assert_ok()
    found = outcome.json
    assert set(found) == documented_fields("`export`") | {"ok"}
    assert (found["ok"], found["format"], found["folder"]) == (True, "openrl-v2", str(tmp_path / "out"))
    assert (found["base_version"], found["version"]) == (1, 2)
    layers = check_openrl_delta(tmp_path / "out")
    assert found["changed_tensors"] == len(layers)
    assert found["changed_elements"] == sum(indices.numel() for indices, _ in layers.values())


def test_export_of_the_newest_version_from_an_earlier_one_materializes_to_it(floats: FloatRun, tmp_path: Path):
    outcome = Outcome("export", floats.sync_dir, tmp_path / "delta", "--from", 0)
    outcome.assert_ok()
    assert outcome.stdout.startswith(f"{tmp_path}/delta: openrl-v2, version 0 to 3, ")
    Outcome("materialize", tmp_path / "delta", tmp_path / "out", "--base", floats.base).assert_ok()
    checkpoint = Checkpoint(tmp_path / "out")
    assert_same_state({name: checkpoint.bits(name) for name in checkpoint.specs}, floats.history[3])


@forms
def test_export_of_differences_without_the_base_asks_for_it(form: tuple[str, ...], tmp_path: Path):
    run = make_float_run(tmp_path, ["difference"])
    moved = run.base.rename(tmp_path / "moved")
    outcome = Outcome("export", run.sync_dir, tmp_path / "out", "--from", 0, *form)
    message = outcome.assert_failed(2, "ObjectNotFound")
    assert f"delta-snapshot export {run.sync_dir} {tmp_path}/out --from 0 --base FOLDER" in message
    assert not (tmp_path / "out").exists()
    Outcome("export", run.sync_dir, tmp_path / "out", "--from", 0, "--base", moved, *form).assert_ok()


def test_export_of_absolute_values_needs_no_base(tmp_path: Path):
    run = make_float_run(tmp_path, ["raw"])
    run.base.rename(tmp_path / "moved")
    Outcome("export", run.sync_dir, tmp_path / "out").assert_ok()


def of_integers(folder: Path) -> tuple[object, ...]:
    run = make_run(folder, 2)
    return (f"{run.sync_dir}@2", "--from", 0)


def of_skyrl_integers(folder: Path) -> tuple[object, ...]:
    run = make_skyrl_run(folder, 2)
    return (run.sync_dir, "--base", run.base)


@forms
@pytest.mark.parametrize("make", [of_integers, of_skyrl_integers])
def test_export_of_integers_is_refused_by_name(
    form: tuple[str, ...], tmp_path: Path, make: Callable[[Path], tuple[object, ...]]
):
    target, *options = make(tmp_path)
    message = Outcome("export", target, tmp_path / "out", *options, *form).assert_failed(1, "UnsupportedFormat")
    assert "tensor model.layers.0.step" in message
    assert not (tmp_path / "out").exists()


@forms
@pytest.mark.parametrize(
    ("args", "kind"),
    [
        (("@9",), "BrokenChain"),
        (("@0",), "OutOfOrder"),
        (("@2", "--from", "2"), "OutOfOrder"),
        (("/none",), "ObjectNotFound"),
    ],
    ids=lambda value: "".join(value),
)
def test_export_that_fails_leaves_nothing(
    floats: FloatRun, tmp_path: Path, args: tuple[str, ...], kind: str, form: tuple[str, ...]
):
    suffix, *options = args
    Outcome("export", f"{floats.sync_dir}{suffix}", tmp_path / "out", *options, *form).assert_failed(1, kind)
    assert snapshot_of(tmp_path) == {}


def test_export_with_wrong_arguments_is_wrong_usage(floats: FloatRun, openrl: list[Path], tmp_path: Path):
    assert "openrl-v2" in Outcome("export", floats.sync_dir, tmp_path / "out", "--format", "gguf").usage
    assert "OpenRL's form already" in Outcome("export", openrl[0], tmp_path / "out").usage
    assert "--from" in Outcome("export", floats.sync_dir, tmp_path / "out", "--from", -1).usage
    assert "Usage: delta-snapshot export" in Outcome("export", floats.sync_dir).usage


def test_store_of_another_kind_is_wrong_usage(pristine: SkyRLRun, tmp_path: Path):
    for args in (
        ("verify", "ftp://host/delta-1", pristine.delta(1), "--base", pristine.base),
        ("export", "ftp://host/run", tmp_path / "out"),
    ):
        assert "Mount the store as a folder" in Outcome(*args).assert_failed(2, "CompatibilityError")
