"""What is moved and tried again is counted where it happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import damage
from tests.support.faults import FaultyStore
from tests.support.hosts import Host
from tests.support.runs import copy_of, make_run
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import StoreUnavailable
from vllm_delta_snapshot.host.area import stagers_of
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.store.retry import again
from vllm_delta_snapshot.util.traffic import COPIED, FETCHED, WRITTEN, moved_bytes, retries


def test_payload_is_counted_when_it_is_written_and_when_it_is_fetched(tmp_path: Path):
    before = moved_bytes(WRITTEN), moved_bytes(FETCHED), moved_bytes(COPIED)
    run = make_run(tmp_path, 2)
    payload = sum(run.record(version).payload_bytes for version in (1, 2))
    assert moved_bytes(WRITTEN) - before[0] == payload
    materialize(run.folder, Checkpoint(run.base), 2, tmp_path / "out")
    assert moved_bytes(FETCHED) - before[1] == payload
    assert moved_bytes(COPIED) - before[2] > 2 * sum(spec.num_bytes for spec in run.specs.values())
    assert moved_bytes() == moved_bytes(WRITTEN, FETCHED, COPIED)


def test_stager_says_what_it_fetched_and_tried_again(tmp_path: Path):
    run = copy_of(make_run(tmp_path, 3), tmp_path / "copy")
    damage.flip_payload(run.sync_dir)  # of version 1
    host = Host(run, tmp_path / "stage")
    try:
        host.stager.step()
        (told,) = stagers_of(str(run.sync_dir), tmp_path / "stage")
        assert told.fetched_bytes == moved_bytes(FETCHED)
        assert told.retries == retries()
        assert told.retries["stage"] >= 1
        assert stagers_of("/another/run", tmp_path / "stage") == []
        host.area.state.write_text("{")  # whatever lies there, metrics are shown
        assert stagers_of(str(run.sync_dir), tmp_path / "stage") == []
    finally:
        host.close()


def test_read_that_is_made_again_is_counted(tmp_path: Path):
    before = retries().get("read", 0)
    store = FaultyStore(PosixStore(tmp_path), 0, down=True)
    with pytest.raises(StoreUnavailable):
        again(lambda: store.list(""), attempts=3, first_s=1e-9)
    assert retries()["read"] - before == 2
    assert json.dumps(retries())
