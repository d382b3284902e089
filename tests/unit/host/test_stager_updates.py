"""The stager's other updates: mapped for workers, back to earlier versions, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.hosts import Host, places_of
from tests.support.runs import TinyRun, make_run
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import error_of_fields
from vllm_delta_snapshot.host.places import PlaceMap, Segment
from vllm_delta_snapshot.runs.materialize import materialize


@pytest.fixture(params=["raw", "difference", "auto"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> TinyRun:
    """Of absolute values, of differences, of both."""
    return make_run(tmp_path, versions=3, encoding=request.param)


@pytest.fixture
def places(run: TinyRun) -> PlaceMap:
    return places_of(run)


@pytest.fixture
def host(run: TinyRun, tmp_path: Path) -> Iterator[Host]:
    host = Host(run, tmp_path / "stage")
    yield host
    host.close()


def publish(run: TinyRun, version: int) -> None:
    run.trainer.step(version)
    run.publisher.publish()
    run.history.append(run.trainer.state())


def test_update_is_mapped_for_a_worker_that_says_where_its_weights_lie(host: Host, places: PlaceMap) -> None:
    host.tell(0, 0, places)
    host.stager.step()
    assert host.mapped() == {f"00000000-00000003-{places.id}"}
    host.check_mapped(0, 3, places)


def test_worker_that_says_nothing_gets_nothing_mapped(host: Host) -> None:
    host.stager.step()
    assert host.staged() == {"00000000-00000003"}
    assert host.mapped() == set()


def test_single_version_is_mapped_too(host: Host, places: PlaceMap) -> None:
    host.tell(0, 2, places)
    host.stager.step()
    host.check_mapped(2, 3, places)


def test_workers_with_the_same_places_share_one_and_others_get_their_own(
    host: Host, run: TinyRun, places: PlaceMap
) -> None:
    other = places_of(run, shift=5)
    host.tell(0, 0, places)
    host.attach(0, places)
    host.attach(0, other)
    host.attach(2, other)
    host.stager.step()
    assert host.mapped() == {
        f"00000000-00000003-{places.id}",
        f"00000000-00000003-{other.id}",
        f"00000002-00000003-{other.id}",
    }
    host.check_mapped(0, 3, places)
    host.check_mapped(0, 3, other)
    host.check_mapped(2, 3, other)


def test_worker_that_moves_its_weights_gets_staged_updates_mapped_again(
    host: Host, run: TinyRun, places: PlaceMap
) -> None:
    host.tell(0, 0, places)
    host.stager.step()
    moved = places_of(run, shift=9)
    host.tell(0, 0, moved)
    host.stager.step()
    host.check_mapped(0, 3, moved)


def test_update_that_a_worker_wants_is_staged_and_mapped(host: Host, places: PlaceMap) -> None:
    host.tell(0, 1, places)
    host.want(1, 2)
    host.stager.step()
    assert host.staged() == {"00000001-00000002", "00000001-00000003"}
    host.check_mapped(1, 2, places)
    host.check_update(1, 2)


def test_update_that_is_wanted_before_it_is_published_comes_when_it_is(
    host: Host, run: TinyRun, places: PlaceMap
) -> None:
    host.tell(0, 3, places)
    host.want(3, 4)
    host.stager.step()
    assert host.staged() == set()
    assert host.state.problem is None
    publish(run, 4)
    host.stager.step()
    host.check_mapped(3, 4, places)


@pytest.mark.parametrize("wanted", [(1, 1), (2, 3), (9, 3)])
def test_what_nobody_can_use_is_not_staged(wanted: tuple[int, int], host: Host) -> None:
    host.tell(0, 1)
    host.want(*wanted)
    host.stager.step()
    assert host.staged() == {"00000001-00000003"}


@pytest.mark.parametrize(("base", "version"), [(3, 2), (3, 1), (3, 0), (2, 0), (1, 0)])
def test_worker_may_go_back_to_any_version(base: int, version: int, host: Host, places: PlaceMap) -> None:
    host.tell(0, base, places)
    host.want(base, version)
    host.stager.step()
    assert host.state.problem is None
    host.check_update(base, version)
    host.check_mapped(base, version, places)


def test_worker_that_went_back_can_go_forward_again(host: Host, run: TinyRun, places: PlaceMap) -> None:
    host.tell(0, 3, places)
    host.want(3, 1)
    host.stager.step()
    host.tell(0, 1, places)
    host.stager.step()
    assert host.staged() == {"00000001-00000003"}
    host.check_mapped(1, 3, places)
    publish(run, 4)
    host.stager.step()
    host.check_mapped(1, 4, places)


def test_going_back_is_only_done_when_asked(host: Host) -> None:
    host.tell(0, 3)
    host.stager.step()
    assert host.staged() == set()


@pytest.fixture
def late_host(run: TinyRun, tmp_path: Path) -> Iterator[Host]:
    """A host whose engines start from version 1."""
    materialize(run.folder, Checkpoint(run.base), 1, tmp_path / "one")
    host = Host(run, tmp_path / "stage", tmp_path / "one", retry_interval_s=0.3)
    yield host
    host.close()


@pytest.mark.parametrize("version", [1, 2])
def test_engine_of_a_materialized_version_may_go_back_to_it(version: int, late_host: Host, places: PlaceMap) -> None:
    late_host.tell(0, 3, places)
    late_host.want(3, version)
    late_host.stager.step()
    late_host.check_update(3, version)
    late_host.check_mapped(3, version, places)


def test_going_back_to_before_the_checkpoint_is_out_of_order(late_host: Host) -> None:
    late_host.tell(0, 3)
    late_host.want(3, 0)
    late_host.stager.step()
    assert late_host.staged() == set()
    problem = late_host.state.problem
    assert problem is not None
    assert problem.error["kind"] == "OutOfOrder"
    assert "before the engine's checkpoint" in str(error_of_fields(problem.error))


def test_update_that_cannot_be_made_does_not_keep_new_versions_from_being_fetched(
    late_host: Host, run: TinyRun
) -> None:
    late_host.stager.step()
    late_host.tell(0, 3)
    late_host.want(3, 0)
    late_host.stager.step()
    publish(run, 4)
    deadline = time.monotonic() + 5 * 0.3
    while time.monotonic() < deadline and late_host.state.newest < 4:
        late_host.stager.step()
        time.sleep(0.02)
    assert late_host.state.newest == 4
    late_host.check_update(3, 4)


def test_tied_tensors_that_become_different_are_a_problem_and_nothing_is_mapped(host: Host, run: TinyRun) -> None:
    names = ["model.embed.weight", "model.layers.0.attn.weight"]
    for name, value in zip(names, (1, 2), strict=True):
        run.trainer.poke(name, np.array([5]), np.array([value], np.uint16))
    publish(run, 4)
    tied = PlaceMap({name: [Segment(0, (64,), 0, (1,), 0, (1,))] for name in names})
    host.tell(0, 3, tied)
    host.stager.step()
    assert host.staged() == {"00000003-00000004"}
    assert host.mapped() == set()
    assert host.state.problem is not None
    assert host.state.problem.error["kind"] == "ApplyError"


def test_places_that_cannot_be_read_are_a_problem(host: Host, places: PlaceMap) -> None:
    host.tell(0, 0, places)
    (host.area.places / places.id / "places.json").write_text("{")
    host.stager.step()
    assert host.mapped() == set()
    assert host.state.problem is not None
    assert host.state.problem.error["kind"] == "CorruptFile"


def test_what_no_worker_can_use_any_more_is_removed(host: Host, places: PlaceMap) -> None:
    host.tell(0, 1, places)
    host.attach(3, places)
    host.want(1, 2)
    host.want(3, 2)
    host.stager.step()
    assert {name[:17] for name in host.mapped()} == {"00000001-00000002", "00000001-00000003", "00000003-00000002"}
    host.tell(0, 3, places)
    host.stager.step()
    assert host.staged() == {"00000003-00000002"}
    assert host.mapped() == {f"00000003-00000002-{places.id}"}
    assert [path.name for path in host.area.wanted.iterdir()] == ["00000003-00000002"]
    assert list(host.area.fetched.iterdir()) == []


def test_stager_that_takes_over_goes_on_with_what_is_there(host: Host, run: TinyRun, places: PlaceMap) -> None:
    host.tell(0, 1, places)
    host.want(1, 0)
    host.stager.step()
    before = {path: path.stat().st_mtime_ns for path in [*host.area.mapped.iterdir(), *host.area.staged.iterdir()]}
    torn = host.area.mapped / f".00000001-00000004-{places.id}.dead"
    torn.mkdir()
    host.start_stager()
    publish(run, 4)
    host.stager.step()
    after = {path: path.stat().st_mtime_ns for path in [*host.area.mapped.iterdir(), *host.area.staged.iterdir()]}
    assert before.items() <= after.items()
    for version in (0, 3, 4):
        host.check_mapped(1, version, places)


def test_stager_that_takes_over_after_going_back_fetches_what_it_needs(host: Host, places: PlaceMap) -> None:
    host.tell(0, 3, places)
    host.want(3, 1)
    host.stager.step()
    host.tell(0, 1, places)
    host.start_stager()
    host.stager.step()
    host.check_mapped(1, 3, places)
