"""Foreign chains: found, replayed, merged and materialized exactly, or refused; nothing of theirs is touched."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import snapshot_of, tiny_tensors, write_checkpoint
from tests.support.openrl import write_openrl_delta
from tests.support.runs import State, assert_same_state, make_run
from tests.support.skyrl import (
    SkyRLRun,
    changed_between,
    edit_manifest,
    edit_tensor,
    make_skyrl_run,
    state_of,
    write_skyrl_delta,
)
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import (
    BrokenChain,
    CorruptFile,
    DeltaSnapshotError,
    ObjectNotFound,
    StageError,
    StoreUnavailable,
    UnsupportedFormat,
    VerifyError,
)
from vllm_delta_snapshot.interop import materialize as materialize_module
from vllm_delta_snapshot.interop.chain import (
    FolderKind,
    ForeignChain,
    find_chain,
    kind_of,
    list_skyrl_folders,
)
from vllm_delta_snapshot.interop.materialize import ForeignMaterializeReport, materialize_chain
from vllm_delta_snapshot.interop.replay import Overlay, merge_chain, read_patches
from vllm_delta_snapshot.interop.verify import ForeignVerification, verify_chain
from vllm_delta_snapshot.runs.materialize import PROVENANCE_NAME
from vllm_delta_snapshot.types import TensorPatch
from vllm_delta_snapshot.util.new_folder import new_folder

VERSIONS = 5
FILE = "delta-rank00000-file000000.safetensors"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> SkyRLRun:
    return make_skyrl_run(tmp_path_factory.mktemp("skyrl"), VERSIONS)


@pytest.fixture
def run(pristine: SkyRLRun, tmp_path: Path) -> SkyRLRun:
    return replace(pristine, sync_dir=Path(shutil.copytree(pristine.sync_dir, tmp_path / "sync")))


@pytest.fixture(scope="module")
def base(pristine: SkyRLRun) -> Checkpoint:
    return Checkpoint(pristine.base)


def chain_of(run: SkyRLRun, version: int | None = None) -> ForeignChain:
    return find_chain([run.sync_dir], version=version)


def state_in(folder: Path) -> State:
    checkpoint = Checkpoint(folder)
    return {name: checkpoint.bits(name) for name in checkpoint.specs}


def flip_payload(run: SkyRLRun, version: int) -> None:
    path = run.delta(version) / FILE
    data = bytearray(path.read_bytes())
    data[-6] ^= 1
    path.write_bytes(data)


# --- OpenRL's deltas of the same weights


def openrl_chain(folder: Path, history: list[State]) -> list[Path]:
    """Write the floating point part of a history as OpenRL deltas."""
    folders = []
    for version, (before, after) in enumerate(pairwise(history), start=1):
        changes = {}
        for name, positions in changed_between(before, after).items():
            tensor = tiny_tensors()[name]
            if tensor.dtype.is_floating_point:
                values = torch.from_numpy(after[name][positions]).view(tensor.dtype)
                changes[name] = (positions, values, list(tensor.shape))
        folders.append(write_openrl_delta(folder / f"sampler-{version}", changes))
    return folders


def floats_of(state: State, first: State) -> State:
    """Return a state whose integers are those of another."""
    return {n: bits if tiny_tensors()[n].dtype.is_floating_point else first[n] for n, bits in state.items()}


@pytest.fixture(scope="module")
def openrl(pristine: SkyRLRun, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return openrl_chain(tmp_path_factory.mktemp("openrl"), pristine.history)


# --- what a folder is


def test_kinds_of_folders_are_told_apart(pristine: SkyRLRun, openrl: list[Path], tmp_path: Path):
    ours = make_run(tmp_path, 1)
    (tmp_path / "empty").mkdir()
    assert kind_of(ours.sync_dir) is FolderKind.RUN
    assert kind_of(ours.payload(1).parent) is FolderKind.DELTA
    assert kind_of(openrl[0]) is FolderKind.OPENRL
    assert kind_of(pristine.delta(1)) is FolderKind.SKYRL
    assert kind_of(pristine.sync_dir) is FolderKind.SKYRL_SYNC_DIR
    others = [tmp_path / "empty", tmp_path / "none", ours.base, ours.sync_dir / "run.json", ours.sync_dir / "deltas"]
    assert [kind_of(folder) for folder in others] == [None] * 5


def test_kind_of_a_folder_with_damaged_metadata_is_an_error(tmp_path: Path):
    (tmp_path / "metadata.json").write_text("{")
    with pytest.raises(CorruptFile):
        kind_of(tmp_path)


def test_folder_that_cannot_be_listed_is_told(pristine: SkyRLRun, monkeypatch: pytest.MonkeyPatch):
    def fail(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", fail)
    with pytest.raises(StoreUnavailable) as caught:
        kind_of(pristine.sync_dir)
    assert caught.value.file == str(pristine.sync_dir)


# --- which deltas follow each other


def versions_of(chain: ForeignChain) -> list[tuple[int | None, int | None]]:
    return [(delta.base_version, delta.version) for delta in chain.deltas]


@pytest.mark.parametrize("version", [None, 0, 1, 3, 5])
def test_sync_dir_is_the_chain_from_the_base(pristine: SkyRLRun, version: int | None):
    chain = chain_of(pristine, version)
    newest = VERSIONS if version is None else version
    assert versions_of(chain) == [(v - 1, v) for v in range(1, newest + 1)]
    assert (chain.kind, chain.base_version, chain.version) == (FolderKind.SKYRL, 0, newest)
    assert [delta.folder for delta in chain.deltas] == [pristine.delta(v) for v in range(1, newest + 1)]


def test_other_names_in_a_sync_dir_are_ignored(run: SkyRLRun):
    shutil.copytree(run.delta(1), run.sync_dir / "delta-6")
    shutil.copytree(run.delta(1), run.sync_dir / "delta-00000006.tmp")
    (run.sync_dir / "delta-00000007").write_text("a file")
    assert list(list_skyrl_folders(run.sync_dir)) == [1, 2, 3, 4, 5]
    assert chain_of(run).version == 5


def test_folder_without_a_manifest_is_not_committed(run: SkyRLRun):
    (run.delta(5) / "manifest.json").unlink()
    assert chain_of(run).version == 4
    with pytest.raises(BrokenChain, match="missing: 5"):
        chain_of(run, 5)


@pytest.mark.parametrize(("missing", "version"), [([2], None), ([1], None), ([1, 2], 3), ([4], 4)])
def test_gap_is_a_broken_chain_that_names_what_is_missing(run: SkyRLRun, missing: list[int], version: int | None):
    for number in missing:
        shutil.rmtree(run.delta(number))
    with pytest.raises(BrokenChain) as caught:
        chain_of(run, version)
    assert f"missing: {', '.join(map(str, missing))}" in str(caught.value.found)
    assert caught.value.file == str(run.sync_dir)
    assert caught.value.hint


def test_version_that_is_not_published_is_a_broken_chain(pristine: SkyRLRun):
    with pytest.raises(BrokenChain, match="newest is 5, missing: 6, 7"):
        chain_of(pristine, 7)


def test_gap_before_the_version_asked_for_does_not_matter_after_it(run: SkyRLRun):
    shutil.rmtree(run.delta(4))
    assert chain_of(run, 3).version == 3


def test_deltas_in_order_are_a_chain_from_any_version(pristine: SkyRLRun):
    chain = find_chain([pristine.delta(3), pristine.delta(4)])
    assert (versions_of(chain), chain.base_version, chain.version) == ([(2, 3), (3, 4)], 2, 4)


@pytest.mark.parametrize("order", [(2, 1), (1, 3), (1, 2, 2), (1, 2, 1)], ids=str)
def test_deltas_out_of_order_are_a_broken_chain(pristine: SkyRLRun, order: tuple[int, ...]):
    with pytest.raises(BrokenChain, match="does not continue the chain") as caught:
        find_chain([pristine.delta(version) for version in order])
    assert caught.value.file == str(pristine.delta(order[-1]) / "manifest.json")
    assert caught.value.hint


def test_version_of_deltas_that_are_listed_is_refused(pristine: SkyRLRun, openrl: list[Path]):
    for folders in ([pristine.delta(1)], openrl[:1], [pristine.delta(1), pristine.delta(2)]):
        with pytest.raises(BrokenChain, match="no versions to choose from"):
            find_chain(folders, version=1)


def test_openrl_deltas_are_a_chain_in_the_order_given(openrl: list[Path]):
    chain = find_chain([openrl[2], openrl[0]])
    assert [delta.folder for delta in chain.deltas] == [openrl[2], openrl[0]]
    assert (chain.kind, chain.base_version, chain.version) == (FolderKind.OPENRL, None, None)


def test_folders_of_different_kinds_make_no_chain(pristine: SkyRLRun, openrl: list[Path]):
    for folders in (
        [pristine.delta(1), openrl[0]],
        [pristine.sync_dir, pristine.delta(1)],
        [pristine.sync_dir, pristine.sync_dir],
    ):
        with pytest.raises(BrokenChain, match="make no chain"):
            find_chain(folders)


def test_ours_is_no_foreign_chain(tmp_path: Path):
    ours = make_run(tmp_path, 1)
    for folder in (ours.sync_dir, ours.payload(1).parent):
        with pytest.raises(CorruptFile, match="of ours") as caught:
            find_chain([folder])
        assert caught.value.hint


def test_nothing_is_no_chain(tmp_path: Path):
    with pytest.raises(ObjectNotFound, match="no delta here") as caught:
        find_chain([tmp_path])
    assert caught.value.hint


# --- replay and merge


def replayed(chain: ForeignChain, base: Checkpoint) -> list[State]:
    """Return the state after every delta, applied one by one."""
    overlay, states = Overlay(base), []
    for delta in chain.deltas:
        for patch in read_patches(delta, base.specs, overlay.bits):
            overlay.write(patch)
        states.append({name: overlay.bits(name).copy() for name in base.specs})
    return states


def applied(base: Checkpoint, patches: list[TensorPatch]) -> State:
    state = {name: base.bits(name).copy() for name in base.specs}
    for patch in patches:
        state[patch.spec.name][patch.positions] = patch.values
    return state


@pytest.mark.parametrize(
    "options",
    [{}, {"algorithm": "sha256"}, {"is_early": True}, {"tensors_a_file": 1}, {"with_unchanged": True}, {"shards": 3}],
    ids=str,
)
def test_every_version_has_the_true_weights(tmp_path: Path, options: dict[str, Any]):
    run = make_skyrl_run(tmp_path, VERSIONS, seed=1, **options)
    states = replayed(chain_of(run), Checkpoint(run.base))
    for version, state in enumerate(states, start=1):
        assert_same_state(state, run.history[version])


def test_each_delta_has_exactly_the_elements_that_change(pristine: SkyRLRun, base: Checkpoint):
    for version, delta in enumerate(chain_of(pristine).deltas, start=1):
        before = pristine.history[version - 1]
        patches = read_patches(delta, base.specs, before.__getitem__)
        found = {patch.spec.name: patch.positions.tolist() for patch in patches}
        assert found == changed_between(before, pristine.history[version])


def test_replay_writes_nothing(pristine: SkyRLRun, base: Checkpoint):
    before = snapshot_of(pristine.base) | snapshot_of(pristine.sync_dir)
    replayed(chain_of(pristine), base)
    assert snapshot_of(pristine.base) | snapshot_of(pristine.sync_dir) == before


def test_replay_from_another_base_is_found_out(pristine: SkyRLRun, tmp_path: Path):
    other = Checkpoint(write_checkpoint(tmp_path / "other", tiny_tensors(seed=9)))
    with pytest.raises(CorruptFile, match="does not come out"):
        replayed(chain_of(pristine), other)


def test_replay_of_a_chain_with_another_delta_in_place_of_one_is_found_out(run: SkyRLRun, base: Checkpoint):
    shutil.rmtree(run.delta(2))
    run.delta(4).rename(run.delta(2))
    edit_manifest(run.delta(2), version=2, base_version=1)
    with pytest.raises(CorruptFile, match="does not come out"):
        replayed(chain_of(run, 2), base)


@pytest.mark.parametrize("base_version", [0, 1])
def test_wrong_base_version_is_a_broken_chain(run: SkyRLRun, base: Checkpoint, base_version: int):
    edit_manifest(run.delta(3), base_version=base_version)
    with pytest.raises(BrokenChain, match="does not continue the chain") as caught:
        replayed(chain_of(run), base)
    assert caught.value.expected == "version 3 from base version 2"
    assert caught.value.found == f"version 3 from base version {base_version}"


def test_openrl_deltas_are_applied_in_the_order_given(pristine: SkyRLRun, openrl: list[Path], base: Checkpoint):
    states = replayed(find_chain(openrl), base)
    for version, state in enumerate(states, start=1):
        assert_same_state(state, floats_of(pristine.history[version], pristine.history[0]))


def test_overlay_copies_only_what_is_written(base: Checkpoint):
    overlay = Overlay(base)
    name = "model.embed.weight"
    empty = np.empty(0, np.int32)
    overlay.write(TensorPatch(base.specs[name], empty, np.empty(0, np.uint16)))
    assert np.shares_memory(overlay.bits(name), base.bits(name))
    overlay.write(TensorPatch(base.specs[name], np.array([1], np.int32), np.array([7], np.uint16)))
    assert overlay.bits(name)[1] == 7
    assert not np.shares_memory(overlay.bits(name), base.bits(name))


@pytest.mark.parametrize("version", [1, 2, VERSIONS])
def test_merged_equals_one_by_one(pristine: SkyRLRun, base: Checkpoint, version: int):
    merged = merge_chain(chain_of(pristine, version), base)
    assert len({patch.spec.name for patch in merged}) == len(merged)
    assert_same_state(applied(base, merged), pristine.history[version])


@pytest.mark.parametrize("after", range(VERSIONS))
def test_merged_after_a_version_leads_from_there(pristine: SkyRLRun, base: Checkpoint, after: int):
    state = {name: bits.copy() for name, bits in pristine.history[after].items()}
    merged = merge_chain(chain_of(pristine), base, after=after)
    for patch in merged:
        state[patch.spec.name][patch.positions] = patch.values
    assert_same_state(state, pristine.history[VERSIONS])
    touched: set[tuple[str, int]] = set()
    for version in range(after, VERSIONS):
        changed = changed_between(pristine.history[version], pristine.history[version + 1])
        touched |= {(name, position) for name, positions in changed.items() for position in positions}
    assert {(patch.spec.name, position) for patch in merged for position in patch.positions.tolist()} == touched


def test_openrl_deltas_are_merged(pristine: SkyRLRun, openrl: list[Path], base: Checkpoint):
    merged = merge_chain(find_chain(openrl), base)
    expected = floats_of(pristine.history[VERSIONS], pristine.history[0])
    assert_same_state(applied(base, merged), expected)


def test_chain_without_deltas_merges_to_nothing(pristine: SkyRLRun, base: Checkpoint):
    assert merge_chain(chain_of(pristine, 0), base) == []


# --- materialize


def assert_nothing_left(folder: Path, *kept: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(kept)


@pytest.mark.parametrize("version", range(VERSIONS + 1))
def test_checkpoint_at_any_version_has_the_true_weights(
    pristine: SkyRLRun, base: Checkpoint, tmp_path: Path, version: int
):
    report = materialize_chain(chain_of(pristine, version), base, tmp_path / "out")
    assert_same_state(state_in(tmp_path / "out"), pristine.history[version])
    assert_nothing_left(tmp_path, "out")
    changed = sum(
        len(positions)
        for v in range(version)
        for positions in changed_between(pristine.history[v], pristine.history[v + 1]).values()
    )
    digest = Checkpoint(tmp_path / "out").state_digest
    assert report == ForeignMaterializeReport(
        str(tmp_path / "out"), "SkyRL delta", version, version, digest, changed
    )  # fmt: skip


def test_checkpoint_equals_the_one_that_a_run_of_ours_materializes(tmp_path: Path):
    # The same trainer, published by both.
    ours, theirs = make_run(tmp_path / "ours", VERSIONS, seed=3), make_skyrl_run(tmp_path / "theirs", VERSIONS, seed=3)
    report = materialize_chain(chain_of(theirs), Checkpoint(theirs.base), tmp_path / "out")
    assert report.state_digest == ours.publisher.state_digest


def test_checkpoint_from_a_later_version_and_the_deltas_after_it(pristine: SkyRLRun, base: Checkpoint, tmp_path: Path):
    materialize_chain(chain_of(pristine, 2), base, tmp_path / "two")
    chain = find_chain([pristine.delta(version) for version in (3, 4, 5)])
    report = materialize_chain(chain, Checkpoint(tmp_path / "two"), tmp_path / "out")
    assert_same_state(state_in(tmp_path / "out"), pristine.history[5])
    assert (report.version, report.deltas) == (5, 3)


def test_sharded_base_gives_the_same_shards(tmp_path: Path):
    run = make_skyrl_run(tmp_path, 3, shards=3)
    materialize_chain(chain_of(run), Checkpoint(run.base), tmp_path / "out")
    assert_same_state(state_in(tmp_path / "out"), run.history[3])
    names = {path.name for path in run.base.iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {PROVENANCE_NAME}


def test_openrl_deltas_make_a_checkpoint(pristine: SkyRLRun, openrl: list[Path], base: Checkpoint, tmp_path: Path):
    report = materialize_chain(find_chain(openrl), base, tmp_path / "out")
    assert_same_state(state_in(tmp_path / "out"), floats_of(pristine.history[VERSIONS], pristine.history[0]))
    assert (report.kind, report.version, report.deltas) == ("OpenRL sparse_delta", None, VERSIONS)


def test_provenance_says_what_was_applied(pristine: SkyRLRun, base: Checkpoint, tmp_path: Path):
    report = materialize_chain(chain_of(pristine, 2), base, tmp_path / "out")
    assert json.loads((tmp_path / "out" / PROVENANCE_NAME).read_text()) == {
        "made_from": "SkyRL delta",
        "version": 2,
        "deltas": ["delta-00000001", "delta-00000002"],
        "state_digest": report.state_digest,
    }


def test_base_and_deltas_are_not_touched(pristine: SkyRLRun, base: Checkpoint, tmp_path: Path):
    before = snapshot_of(pristine.base), snapshot_of(pristine.sync_dir)
    materialize_chain(chain_of(pristine), base, tmp_path / "out")
    assert (snapshot_of(pristine.base), snapshot_of(pristine.sync_dir)) == before


def test_progress_is_told_after_every_delta(pristine: SkyRLRun, base: Checkpoint, tmp_path: Path):
    told: list[tuple[int, int]] = []
    materialize_chain(chain_of(pristine, 3), base, tmp_path / "out", progress=lambda *args: told.append(args))
    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("version", [1, 3, 5])
def test_damaged_delta_leaves_nothing(run: SkyRLRun, base: Checkpoint, tmp_path: Path, version: int):
    flip_payload(run, version)
    with pytest.raises(CorruptFile) as caught:
        materialize_chain(chain_of(run), base, tmp_path / "out")
    assert str(caught.value.file).startswith(str(run.delta(version)))
    assert_nothing_left(tmp_path, "sync")


def test_base_of_another_version_leaves_nothing(pristine: SkyRLRun, base: Checkpoint, tmp_path: Path):
    materialize_chain(chain_of(pristine, 1), base, tmp_path / "one")
    with pytest.raises(CorruptFile, match="does not come out"):
        materialize_chain(chain_of(pristine), Checkpoint(tmp_path / "one"), tmp_path / "out")
    assert_nothing_left(tmp_path, "one")


def test_base_with_other_tensors_leaves_nothing(pristine: SkyRLRun, tmp_path: Path):
    other = Checkpoint(write_checkpoint(tmp_path / "other", {"a": torch.zeros(3)}))
    with pytest.raises(CorruptFile, match="does not fit the checkpoint"):
        materialize_chain(chain_of(pristine), other, tmp_path / "out")
    assert_nothing_left(tmp_path, "other")


def test_patch_that_did_not_reach_the_disk_is_a_verify_error(
    pristine: SkyRLRun, base: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(materialize_module, "write_patches", lambda _base, _work, patches: list(patches))
    with pytest.raises(VerifyError, match="other weights than the deltas make"):
        materialize_chain(chain_of(pristine, 1), base, tmp_path / "out")
    assert_nothing_left(tmp_path)


def test_output_that_is_in_use_is_refused_and_kept(pristine: SkyRLRun, base: Checkpoint, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(StageError, match="not an empty folder"):
        materialize_chain(chain_of(pristine), base, tmp_path / "out")
    assert snapshot_of(tmp_path) == {"out/mine": b"precious"}


def test_output_that_is_an_empty_folder_or_has_no_parent_is_used(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "not" / "yet"):
        with new_folder(out) as work:
            (work / "file").write_text("x")
        assert snapshot_of(out) == {"file": b"x"}
    assert_nothing_left(tmp_path, "empty", "not")


def test_output_that_cannot_be_written_is_a_stage_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StageError, match="cannot write"), new_folder(tmp_path / "file" / "out"):
        pass
    with pytest.raises(StageError, match="cannot write"), new_folder(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    assert_nothing_left(tmp_path, "file")


# --- verify


def problems_of(found: ForeignVerification) -> list[tuple[int | None, str, str | None]]:
    return [(p.delta.version, type(p.error).__name__, p.error.tensor) for p in found.problems]


def test_good_chain_is_ok(pristine: SkyRLRun, base: Checkpoint):
    told: list[tuple[int, int]] = []
    found = verify_chain(chain_of(pristine), base, progress=lambda *args: told.append(args))
    assert found.is_ok
    assert (found.kind, found.version, found.deltas) == ("SkyRL delta", 5, 5)
    assert found.payload_bytes == sum(path.stat().st_size for path in pristine.sync_dir.rglob("*.safetensors"))
    assert found.changed_elements > 0
    assert found.not_checked == []
    assert told == [(n, 5) for n in range(1, 6)]


def test_tensors_that_no_delta_changes_are_named_as_not_checked(pristine: SkyRLRun, base: Checkpoint):
    assert verify_chain(chain_of(pristine, 1), base).not_checked == [
        "tensors that no delta changes (4): SkyRL has checksums of changed tensors only"
    ]


def test_damaged_tensor_is_told_once_and_not_followed(run: SkyRLRun, base: Checkpoint):
    edit_tensor(run.delta(1), 0, checksum="0" * 32)
    found = verify_chain(chain_of(run), base)
    name = "model.layers.0.attn.weight"
    assert problems_of(found) == [(1, "CorruptFile", name)]
    assert found.not_checked == [f"tensors of version {version} that were damaged before (1)" for version in (3, 5)]


def test_damaged_payload_is_told(run: SkyRLRun, base: Checkpoint):
    flip_payload(run, 2)
    found = verify_chain(chain_of(run), base)
    assert [version for version, _, _ in problems_of(found)] == [2]
    assert str(found.problems[0].error.file).startswith(str(run.delta(2)))


def test_delta_that_cannot_be_opened_leaves_later_checksums_unchecked(run: SkyRLRun, base: Checkpoint):
    (run.delta(2) / FILE).write_bytes(b"")
    edit_tensor(run.delta(4), 0, dtype="float64")
    found = verify_chain(chain_of(run), base)
    assert [(v, kind) for v, kind, _ in problems_of(found)] == [(2, "CorruptFile"), (4, "CorruptFile")]
    assert [text for text in found.not_checked if "checksums of" in text and "version" in text] == [
        f"checksums of version {version}: what it starts from is damaged" for version in (3, 5)
    ]


def test_wrong_base_version_is_a_problem(run: SkyRLRun, base: Checkpoint):
    edit_manifest(run.delta(3), base_version=1)
    assert problems_of(verify_chain(chain_of(run), base)) == [(3, "BrokenChain", None)]


def test_wrong_base_is_a_problem_of_every_tensor(pristine: SkyRLRun, tmp_path: Path):
    other = Checkpoint(write_checkpoint(tmp_path / "other", tiny_tensors(seed=9)))
    found = verify_chain(chain_of(pristine), other)
    assert len(found.problems) == len({tensor for _, _, tensor in problems_of(found)}) == 6
    assert found.changed_elements == 0


def test_store_that_goes_away_is_raised(run: SkyRLRun, base: Checkpoint):
    (run.delta(2) / FILE).unlink()
    (run.delta(2) / FILE).mkdir()
    with pytest.raises(StoreUnavailable):
        verify_chain(chain_of(run), base)


def test_good_openrl_deltas_are_ok_and_it_is_said_what_is_not_checked(openrl: list[Path], base: Checkpoint):
    found = verify_chain(find_chain(openrl), base)
    assert found.is_ok
    assert (found.kind, found.version, found.deltas) == ("OpenRL sparse_delta", None, VERSIONS)
    assert found.payload_bytes == sum((folder / "delta.safetensors").stat().st_size for folder in openrl)
    assert len(found.not_checked) == 3
    assert "no checksums" in found.not_checked[0]


def change(value: torch.Tensor, shape: list[int]) -> dict[str, Any]:
    return {"model.embed.weight": ([1], value, shape)}


GOOD = change(torch.ones(1, dtype=torch.bfloat16), [13, 8])


def swap_payload(folder: Path) -> None:
    other = {"model.norm.weight": ([1], torch.ones(1), [8])}
    shutil.copy(write_openrl_delta(folder.parent / "other", other) / "delta.safetensors", folder)


def rename_layers(folder: Path) -> None:
    data = (folder / "delta.safetensors").read_bytes()
    (folder / "delta.safetensors").write_bytes(data.replace(b"embed", b"ebmed"))


@pytest.mark.parametrize(
    ("changes", "more", "harm", "tensor"),
    [
        (GOOD, {"changed_elements": 2}, None, None),
        (GOOD, {}, swap_payload, "model.embed.weight"),
        (GOOD, {}, rename_layers, None),
        (GOOD, {}, lambda folder: (folder / "delta.safetensors").unlink(), None),
        (change(torch.ones(1, dtype=torch.bfloat16), [8, 13]), {}, None, "model.embed.weight"),
        (change(torch.ones(1), [13, 8]), {}, None, "model.embed.weight"),
        ({"model.layers.0.step": ([0], torch.ones(1, dtype=torch.int64), [])}, {}, None, "model.layers.0.step"),
        ({"model.x": ([0], torch.ones(1), [1])}, {}, None, "model.x"),
        ({"model.norm.weight": ([3, 2], torch.ones(2), [8])}, {}, None, "model.norm.weight"),
    ],
    ids=["count", "payload", "header", "missing", "shape", "type", "integer", "name", "order"],
)
def test_openrl_delta_that_is_wrong_is_a_problem(
    base: Checkpoint,
    tmp_path: Path,
    changes: dict[str, Any],
    more: dict[str, Any],
    harm: Callable[[Path], None] | None,
    tensor: str | None,
):
    bad = write_openrl_delta(tmp_path / "bad", changes, **more)
    if harm:
        harm(bad)
    good = write_openrl_delta(tmp_path / "good", GOOD)
    found = verify_chain(find_chain([bad, good]), base)
    [problem] = found.problems
    assert isinstance(problem.error, CorruptFile | ObjectNotFound)
    assert (problem.delta.folder, problem.error.tensor) == (bad, tensor)
    assert found.changed_elements == 1  # of the good one


def test_openrl_delta_without_counts_and_names_in_its_header_is_ok(base: Checkpoint, tmp_path: Path):
    folder = write_openrl_delta(tmp_path / "d", GOOD)
    save_file(load_file(folder / "delta.safetensors"), folder / "delta.safetensors")
    fields = json.loads((folder / "metadata.json").read_text())
    kept = {key: fields[key] for key in ("format", "format_version", "layer_names", "layer_shapes")}
    (folder / "metadata.json").write_text(json.dumps(kept))
    assert verify_chain(find_chain([folder]), base).is_ok


def test_openrl_file_that_cannot_be_read_is_raised(base: Checkpoint, tmp_path: Path):
    folder = write_openrl_delta(tmp_path / "d", GOOD)
    (folder / "delta.safetensors").unlink()
    (folder / "delta.safetensors").mkdir()
    with pytest.raises(StoreUnavailable):
        verify_chain(find_chain([folder]), base)


# --- damage, everywhere


def test_every_third_byte_of_a_chain_flipped_is_an_error_or_the_exact_weights(tmp_path: Path):
    old = {"w": torch.arange(4, dtype=torch.bfloat16)}
    states = [old, {"w": old["w"] + 1}, {"w": old["w"] * 2}]
    base = Checkpoint(write_checkpoint(tmp_path / "base", old))
    sync_dir = tmp_path / "sync"
    for version in (1, 2):
        folder = sync_dir / f"delta-{version:08d}"
        write_skyrl_delta(folder, states[version - 1], states[version], version=version)
    expected = [state_of(state)["w"].tolist() for state in states]
    for path in sorted(sync_dir.rglob("*.*")):
        data = path.read_bytes()
        for at in range(len(data) % 3, len(data), 3):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x04]) + data[at + 1 :])
            found = None
            try:
                found = replayed(find_chain([sync_dir]), base)
            except DeltaSnapshotError as error:
                assert error.file  # noqa: PT017
            if found is not None:
                assert [state["w"].tolist() for state in found] == expected[1:], (path.name, at)
        path.write_bytes(data)


def test_delta_of_a_later_tool_is_refused_by_name(run: SkyRLRun, base: Checkpoint):
    edit_tensor(run.delta(1), 0, checksum_algorithm="blake3")
    with pytest.raises(UnsupportedFormat, match="unknown checksum"):
        merge_chain(chain_of(run), base)
