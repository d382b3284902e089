"""The history of a run: what is recorded, and a broken, pruned or anchored chain shown as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support import damage
from tests.support.faults import FaultyStore
from tests.support.runs import TinyRun, copy_of, edit_record, make_run
from vllm_delta_snapshot.errors import BrokenChain, CorruptFile, StoreUnavailable
from vllm_delta_snapshot.format.anchor import AnchorRecord, PrunedMark
from vllm_delta_snapshot.format.layout import anchor_folder, anchor_key, merged_folder, merged_key, pruned_key
from vllm_delta_snapshot.format.version import MergedRecord
from vllm_delta_snapshot.report.history import RunHistory, read_history
from vllm_delta_snapshot.report.layers import layer_of
from vllm_delta_snapshot.report.touched import count_touched
from vllm_delta_snapshot.runs.acks import Acknowledger
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore

NOW = "2026-11-30T00:00:00+00:00"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = make_run(tmp_path_factory.mktemp("run"), 3)
    run.trainer.step(4)
    run.publisher.publish(step=40, metrics={"reward": 0.5})
    return run


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_of(pristine, tmp_path / "run")


def found(history: RunHistory) -> list[tuple[int, type]]:
    return [(problem.version, type(problem.error)) for problem in history.problems]


def write(run: TinyRun, key: str, data: bytes) -> None:
    path = run.sync_dir / key
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def add_anchor(run: TinyRun, version: int) -> None:
    record = run.record(version)
    anchor = AnchorRecord(
        run_id=record.run_id, version=version, publication_id=record.publication_id, metadata_bytes=1,
        folder=anchor_folder(version, record.publication_id), metadata_xxh3_128="0" * 32, payload_bytes=999,
        state_digest=record.state_digest, created_at=NOW,
    )  # fmt: skip
    write(run, anchor_key(version), anchor.to_json())


def add_merged(run: TinyRun, base_version: int, version: int) -> None:
    fields = run.record(version).model_dump() | {
        "kind": "merged", "base_version": base_version,
        "folder": merged_folder(base_version, version, run.record(version).publication_id),
    }  # fmt: skip
    write(run, merged_key(base_version, version), MergedRecord(**fields).to_json())


def prune(run: TinyRun, version: int) -> None:
    mark = PrunedMark(run_id=run.publisher.run_id, version=version, created_at=NOW)
    write(run, pruned_key(version), mark.to_json())
    for number in range(1, version + 1):
        shutil.rmtree(run.sync_dir / run.record(number).folder)


def test_history_is_what_metadata_says(pristine: TinyRun):
    told = []
    history = read_history(pristine.folder, progress=lambda done, total: told.append((done, total)))
    assert (history.problems, history.gaps, history.newest) == ([], [], 4)
    assert told == [(number, 4) for number in range(1, 5)]
    for facts in history.versions:
        metadata = pristine.metadata(facts.version)
        assert facts.changed_tensors == len(metadata.tensors)
        assert (facts.step, dict(facts.metrics)) == (metadata.step, metadata.metrics)
        assert (facts.diff_s, facts.upload_s) == (metadata.timings.diff_s, metadata.timings.upload_s)
        changed = {layer.name: 0 for layer in history.layers}
        for entry in metadata.tensors:
            changed[layer_of(entry.name)] += entry.changed
        assert facts.changed_by_layer.tolist() == list(changed.values())
    assert history.metric_names() == ["reward"]
    assert np.array_equal(history.metric("reward"), [np.nan, np.nan, np.nan, 0.5], equal_nan=True)
    total = sum(spec.numel for spec in pristine.specs.values())
    assert history.densities().tolist() == [pristine.record(n).changed_elements / total for n in range(1, 5)]


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (damage.flip_metadata, [(1, CorruptFile)]),
        (damage.missing_version, [(2, BrokenChain)]),
        (damage.flip_payload, []),  # which only `verify` reads
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_is_told_and_the_rest_is_read(run: TinyRun, harm, expected: list[tuple[int, type]]):
    harm(run.sync_dir)
    history = read_history(run.folder)
    assert found(history) == expected
    assert history.versions[-1].version == 4
    assert history.versions[-1].step == 40


def test_damaged_record_is_told_once(run: TinyRun):
    write(run, "versions/00000002.json", b"{")
    history = read_history(run.folder)
    assert found(history) == [(2, CorruptFile)]
    assert [facts.version for facts in history.versions] == [1, 3, 4]
    assert history.gaps == []


def test_version_that_starts_from_other_weights_breaks_the_chain(run: TinyRun):
    edit_record(run, 2, state_digest="0" * 16)
    assert {version for version, _ in found(read_history(run.folder))} == {2, 3}


def test_gaps_are_told_by_their_ends(run: TinyRun):
    for number in (1, 2):
        (run.sync_dir / "versions" / f"{number:08d}.json").unlink()
    history = read_history(run.folder)
    assert history.gaps == [(1, 2)]
    assert found(history) == [(3, BrokenChain)]


def test_pruned_deltas_are_no_problem_and_keep_what_their_records_say(run: TinyRun):
    prune(run, 2)
    history = read_history(run.folder)
    assert (history.problems, history.pruned) == ([], 2)
    assert [facts.is_pruned for facts in history.versions] == [True, True, False, False]
    assert history.densities()[0] > 0
    assert np.isnan(history.layer_densities()[:, :2]).all()
    assert not np.isnan(history.layer_densities()[:, 2:]).any()
    touched = count_touched(run.folder, history)
    assert (list(touched.versions), touched.after) == ([3, 4], 2)


def test_anchors_and_merged_deltas_are_listed_and_damaged_ones_told(run: TinyRun):
    add_anchor(run, 2)
    add_merged(run, 0, 2)
    add_merged(run, 1, 3)
    write(run, anchor_key(3), b"{}")
    history = read_history(run.folder)
    assert [(anchor.version, anchor.payload_bytes) for anchor in history.anchors] == [(2, 999)]
    assert [(merged.base_version, merged.version) for merged in history.merged] == [(0, 2), (1, 3)]
    assert [problem.version for problem in history.problems] == [3]


def test_acknowledgements_say_how_long_engines_took_and_a_damaged_one_hides_nothing_else(run: TinyRun):
    store = PosixStore(run.sync_dir)
    for sampler, version, pause_s, stage_s in (("a", 3, 0.1, 0.7), ("b", 3, 0.2, None), ("c", 4, 0.3, 0.5)):
        Acknowledger(store, run.publisher.run_id, sampler).write(version, pause_s=pause_s, stage_s=stage_s)
    history = read_history(run.folder)
    assert history.pauses() == {3: 0.2, 4: 0.3}
    assert history.stagings() == {3: 0.7, 4: 0.5}
    write(run, "acks/a/00000009.json", b"{")
    assert (read_history(run.folder).acknowledgements, read_history(run.folder).newest) == ({}, 4)


def test_run_without_versions_has_an_empty_history(tmp_path: Path):
    history = read_history(make_run(tmp_path, 0).folder)
    assert (history.newest, history.payload_bytes, list(history.densities())) == (0, 0, [])
    assert history.layer_densities().shape == (len(history.layers), 0)


def test_store_that_goes_away_is_an_error(pristine: TinyRun):
    with pytest.raises(StoreUnavailable):
        read_history(RunFolder(FaultyStore(PosixStore(pristine.sync_dir), 3, down=True)))
