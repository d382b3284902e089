"""The stager keeps the mirror where a worker wants it, never under a reader, and makes it anew when it is damaged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.hosts import Host
from tests.support.runs import TinyRun, make_run
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import NotStaged
from vllm_delta_snapshot.stage.area import StagerConfig
from vllm_delta_snapshot.stage.handoff import Handoff
from vllm_delta_snapshot.stage.mirror import Mirror
from vllm_delta_snapshot.stage.places import PlaceMap


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return make_run(tmp_path, versions=3)


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
