"""The stager keeps the mirror where a worker wants it, never under a reader, and makes it anew when it is damaged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.hosts import Host
from tests.support.keeper_crash import keep
from tests.support.mirror_crash import tear
from tests.support.mirrors import flip_weights, step_from
from tests.support.runs import TinyRun, make_run
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import NotStaged
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.host.area import StageArea, StagerConfig
from vllm_delta_snapshot.host.handoff import Handoff
from vllm_delta_snapshot.host.mirror import Mirror
from vllm_delta_snapshot.host.places import PlaceMap
from vllm_delta_snapshot.types import TensorPatch

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=["difference", "auto"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> TinyRun:
    """Of differences, or of both kinds."""
    return make_run(tmp_path, versions=3, encoding=request.param)


@pytest.fixture
def host(run: TinyRun, tmp_path: Path) -> Iterator[Host]:
    host = Host(run, tmp_path / "stage")
    yield host
    for worker in host.workers:
        worker.close()


def ask(host: Host, version: int, *, rounds: int = 2) -> None:
    """Want the mirror at a version, and let the stager work."""
    host.area.write(host.area.mirror_target, str(version).encode())
    for _ in range(rounds):
        host.stager.step()


def check_mirror(host: Host, run: TinyRun, version: int) -> Mirror:
    """Compare every bit of the mirror with the trainer's state."""
    mirror = Mirror.open(host.area.mirror)
    assert mirror is not None
    assert (mirror.version, mirror.is_torn) == (version, False)
    fresh = Checkpoint(host.area.mirror)
    assert {n: fresh.bits(n).tolist() for n in fresh.specs} == {
        n: bits.tolist() for n, bits in run.history[version].items()
    }
    return mirror


def test_there_is_no_mirror_unless_somebody_asks(host: Host) -> None:
    host.stager.step()
    assert not host.area.mirror.exists()


@pytest.mark.parametrize("versions", [(0, 1, 3), (3,), (2, 3, 1, 0, 3)])
def test_mirror_goes_where_it_is_wanted_also_back(host: Host, run: TinyRun, versions: tuple[int, ...]) -> None:
    for version in versions:
        ask(host, version)
        check_mirror(host, run, version)


def test_mirror_stays_while_a_worker_holds_it(host: Host, run: TinyRun) -> None:
    ask(host, 1)
    with check_mirror(host, run, 1).pin(1):
        ask(host, 2)
        check_mirror(host, run, 1)
        assert host.state.mirror_error is None
    ask(host, 2)
    check_mirror(host, run, 2)


def test_version_that_is_not_there_leaves_the_mirror_where_it_is(host: Host, run: TinyRun) -> None:
    ask(host, 1)
    ask(host, 9)
    check_mirror(host, run, 1)


def test_mirror_that_somebody_changed_is_made_anew(host: Host, run: TinyRun) -> None:
    ask(host, 1)
    file = next(host.area.mirror.glob("*.safetensors"))
    weights = np.memmap(file, np.uint8, "r+")
    weights[-64:] ^= 0xFF  # every tensor's end, at the least the last one's
    weights[len(weights) // 2 :] ^= 0x01
    weights.flush()
    ask(host, 3, rounds=4)
    check_mirror(host, run, 3)


def test_mirror_with_one_wrong_element_where_a_change_starts_is_made_anew(host: Host, run: TinyRun) -> None:
    ask(host, 1)
    check_mirror(host, run, 1)
    flip_weights(host.area.mirror, "model.layers.0.step")  # which every second version touches
    ask(host, 3, rounds=1)
    assert not host.area.mirror.exists()
    ask(host, 3)
    check_mirror(host, run, 3)


def leave_torn(host: Host, run: TinyRun, base: int, version: int) -> None:
    """Leave the mirror as a death on its way from one version to another does, a tensor written."""
    before, after = run.history[base], run.history[version]
    changed = {name: np.flatnonzero(after[name] != before[name]).astype(np.int32) for name in run.specs}
    patches = [TensorPatch(run.specs[n], at, after[n][at]) for n, at in changed.items() if at.size]
    tear(host.area.mirror, step_from(run.specs, before, patches, version))


@pytest.mark.parametrize(("base", "version", "target"), [(0, 1, 3), (0, 1, 0), (1, 3, 3), (1, 3, 2), (3, 1, 0)])
def test_torn_mirror_is_finished_and_then_goes_where_it_is_wanted(
    host: Host, run: TinyRun, base: int, version: int, target: int
) -> None:
    ask(host, base)
    leave_torn(host, run, base, version)
    mirror_id = json.loads((host.area.mirror / "delta_snapshot_mirror.json").read_text())["mirror_id"]
    host.start_stager()
    ask(host, target, rounds=1)
    check_mirror(host, run, version)
    ask(host, target)
    check_mirror(host, run, target)
    assert json.loads((host.area.mirror / "delta_snapshot_mirror.json").read_text())["mirror_id"] == mirror_id


def test_torn_mirror_with_damage_elsewhere_is_made_anew(host: Host, run: TinyRun) -> None:
    ask(host, 1)
    leave_torn(host, run, 1, 3)
    flip_weights(host.area.mirror)
    ask(host, 3, rounds=1)
    assert not host.area.mirror.exists()
    ask(host, 3)
    check_mirror(host, run, 3)


@pytest.mark.slow
def test_mirror_of_a_stager_killed_at_any_line_goes_on_exactly(ram_path: Path) -> None:
    run = make_run(ram_path, versions=3)
    area = StageArea.of(ram_path / "stage", StagerConfig(sync_dir=str(run.sync_dir), checkpoint=str(run.base)))
    area.write(area.mirror_target, b"3")
    keep(run.sync_dir, run.base, area, 1)
    command = [sys.executable, "-m", "tests.support.keeper_crash", str(run.sync_dir), str(run.base), str(area.path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    outcomes = set()
    for dead in map(StageArea, map(Path, json.loads(done.stdout))):
        mirror = Mirror.open(dead.mirror)
        assert mirror is not None
        outcomes.add("torn" if mirror.is_torn else mirror.version)
        keep(run.sync_dir, run.base, dead, 3)
        for version in (3, 0):
            keep(run.sync_dir, run.base, dead, version)
            found = Mirror.open(dead.mirror)
            assert found is not None
            assert (found.version, found.is_torn) == (version, False)
            assert {n: found.bits(n).tolist() for n in run.specs} == {
                n: bits.tolist() for n, bits in run.history[version].items()
            }
    assert outcomes == {1, "torn", 3}


def test_mirror_of_another_run_is_made_anew(host: Host, run: TinyRun, tmp_path: Path) -> None:
    ask(host, 1)
    other = make_run(tmp_path / "other", versions=1)
    shutil.rmtree(run.sync_dir)
    shutil.copytree(other.sync_dir, run.sync_dir)
    for worker in host.workers:
        worker.close()
    again = Host(other, tmp_path / "elsewhere")
    shutil.copytree(host.area.mirror, again.area.mirror)
    ask(again, 1)
    check_mirror(again, other, 1)
    again.workers[0].close()


@pytest.mark.parametrize(("encoding", "needs_mirror"), [("raw", False), ("raw", True), ("auto", False)])
def test_worker_that_needs_absolute_values_has_a_mirror_only_if_the_run_has_differences(
    tmp_path: Path, encoding: str, needs_mirror: bool
) -> None:
    run = make_run(tmp_path, versions=3, encoding=encoding)
    config = StagerConfig(sync_dir=str(run.sync_dir), checkpoint=str(run.base), poll_interval_s=0.02)
    worker = Handoff(
        config, tmp_path / "stage", PlaceMap({}), timeout_s=60, needs_mirror=needs_mirror, needs_absolute=True
    )
    try:
        found = worker.wait(0, 3, timeout_s=60)
        has_mirror = needs_mirror or worker.read_run().has_differences
        assert (found.mirror is not None) is has_mirror
        assert StageArea.of(tmp_path / "stage", config).mirror_target.exists() is has_mirror
        names = {
            entry["encoding"] for entry in json.loads((found.patches / layout.METADATA_NAME).read_text())["tensors"]
        }
        assert not {name for name in names if name.endswith("difference")}
    finally:
        worker.close()


def test_worker_waits_for_the_mirror_and_starts_from_it(run: TinyRun, tmp_path: Path) -> None:
    config = StagerConfig(sync_dir=str(run.sync_dir), checkpoint=str(run.base))
    worker = Handoff(config, tmp_path / "stage", PlaceMap({}), timeout_s=60, needs_mirror=True)
    try:
        found = worker.wait(0, 2, timeout_s=60)
        assert found.mirror is not None
        assert found.mirror.version == 2
        folder = found.mirror.folder
        warm = Handoff(
            config.model_copy(update={"checkpoint": str(folder)}),
            tmp_path / "stage",
            PlaceMap({}),
            timeout_s=60,
            needs_mirror=True,
        )
        try:
            assert (warm.start_version, warm.oldest_version) == (2, 0)
            assert warm.start_digest == run.record(2).state_digest
            with pytest.raises(NotStaged, match="mirror"):  # the first worker holds it at 2
                warm.mirror_at(3, timeout_s=0.5)
            worker.release()
            assert warm.wait(2, 3, timeout_s=60).mirror is not None
        finally:
            warm.close()
    finally:
        worker.close()
