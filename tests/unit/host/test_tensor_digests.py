"""The digests of all tensors at any version, computed by the stager and asked for by workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hosts import Host
from tests.support.runs import TinyRun, make_run
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import BaseMismatch, DeltaSnapshotError, OutOfOrder
from vllm_delta_snapshot.format.digest import format_digest, tensor_digest
from vllm_delta_snapshot.host.area import StagerConfig
from vllm_delta_snapshot.host.fetched import FetchedVersions
from vllm_delta_snapshot.host.handoff import Handoff
from vllm_delta_snapshot.host.places import PlaceMap
from vllm_delta_snapshot.host.tensor_digests import TensorDigests
from vllm_delta_snapshot.runs.materialize import materialize


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return make_run(tmp_path, versions=3)


def expected(run: TinyRun, version: int) -> dict[str, str]:
    """Compute the digests from the trainer's own state."""
    return {name: format_digest(tensor_digest(run.specs[name], bits)) for name, bits in run.history[version].items()}


def digests_of(run: TinyRun, checkpoint: Path, version: int, area: Path) -> TensorDigests:
    """Return those of a stager with an area of its own, whose engines start from a checkpoint."""
    host = Host(run, area)
    host.close()
    return TensorDigests(
        FetchedVersions(run.folder, host.area, Checkpoint(checkpoint), version), Checkpoint(checkpoint), version
    )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 2, 1), (2, 2)])
def test_digests_at_any_version_are_those_of_the_trainers_state(
    run: TinyRun, order: tuple[int, ...], tmp_path: Path
) -> None:
    digests = digests_of(run, run.base, 0, tmp_path / "stage")
    for version in order:
        assert digests.at(version) == expected(run, version)


def test_digests_from_a_materialized_version_on(run: TinyRun, tmp_path: Path) -> None:
    materialize(run.folder, Checkpoint(run.base), 2, tmp_path / "two")
    digests = digests_of(run, tmp_path / "two", 2, tmp_path / "stage")
    assert digests.at(3) == expected(run, 3)
    with pytest.raises(OutOfOrder, match="before the engine's checkpoint"):
        digests.at(1)


def test_digests_from_another_checkpoint_are_found_out(run: TinyRun, tmp_path: Path) -> None:
    materialize(run.folder, Checkpoint(run.base), 2, tmp_path / "two")
    with pytest.raises(BaseMismatch, match="made against other weights"):
        digests_of(run, tmp_path / "two", 0, tmp_path / "stage").at(1)


def test_workers_get_digests_from_the_stager_and_errors_pass_in_time(run: TinyRun, tmp_path: Path) -> None:
    config = StagerConfig(sync_dir=str(run.sync_dir), checkpoint=str(run.base))
    workers = [Handoff(config, tmp_path / "stage", PlaceMap({}), timeout_s=60) for _ in range(2)]
    try:
        for version in (2, 3, 2):
            for worker in workers:
                assert worker.tensor_digests(version, timeout_s=60) == expected(run, version)
        for worker in workers:
            with pytest.raises(DeltaSnapshotError, match="version 4 does not exist"):
                worker.tensor_digests(4, timeout_s=60)
        run.trainer.step(4)
        run.publisher.publish().wait()
        run.history.append(run.trainer.state())
        for worker in workers:
            assert worker.tensor_digests(4, timeout_s=60) == expected(run, 4)
    finally:
        for worker in workers:
            worker.close()
