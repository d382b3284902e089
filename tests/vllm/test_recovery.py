"""After a refusal: a repaired version is taken, the same version again changes nothing, and there is no way back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.support import damage
from tests.support.engines import Engine, engine
from tests.support.tiny_models import make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.drive import sync_llm
from vllm_delta_snapshot.errors import CorruptFile, OutOfOrder, RunMismatch


def test_engine_takes_a_version_once_it_is_repaired_and_the_same_again_changes_nothing(
    tmp_path: Path,
) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    model = make_model("qwen3", base)
    publisher = DeltaPublisher(model, sync_dir=str(run), base=base, asynchronous=False)
    for number in (1, 2):
        train_step(model, number)
        publisher.publish()
    payload = damage.payload(run, 1)
    content = payload.read_bytes()
    damage.flip_payload(run)
    with engine(base) as live:
        live.init(sync_dir=str(run))
        old = live.checksums()
        with pytest.raises(CorruptFile):
            sync_llm(live.llm, 1, stage_timeout_s=20, run_id=publisher.run_id)
        payload.write_bytes(content)
        # The stager tries again by itself; until then it repeats what was wrong.
        _until_taken(live, 1)
        new = live.checksums()
        assert new != old
        assert sync_llm(live.llm, 1, run_id=publisher.run_id).version == 1
        assert live.checksums() == new
        sync_llm(live.llm, 2, stage_timeout_s=20, run_id=publisher.run_id)
        with pytest.raises(OutOfOrder, match="past that version"):
            sync_llm(live.llm, 1, run_id=publisher.run_id)
        _stays_where_it_is_when_it_is_initialized_again(live, model, publisher, run)


def _stays_where_it_is_when_it_is_initialized_again(
    live: Engine, model: torch.nn.Module, publisher: DeltaPublisher, run: Path
) -> None:
    """By a trainer that restarted, with and without a shutdown between; and an update that nobody finished counts."""
    two = live.checksums()
    live.init(sync_dir=str(run))
    assert live.checksums() == two
    live.shutdown_transfer()
    live.init(sync_dir=str(run))
    train_step(model, 3)
    assert publisher.publish().version == 3
    live.llm.start_weight_update()
    live.llm.update_weights({"update_info": {"version": 3, "run": live.run_id, "timeout_s": 20}})
    three = live.checksums()
    assert three != two
    live.backend.start_weight_update()  # the driver died before it finished, and another one begins
    assert live.backend._at.version == 3
    live.llm.finish_weight_update("3")
    other = make_model("qwen3", run.parent / "other")
    DeltaPublisher(other, sync_dir=str(run.parent / "other-run"), base=run.parent / "base", asynchronous=False)
    with pytest.raises(RunMismatch, match=r"version of another run.*serves .*@3"):
        live.init(sync_dir=str(run.parent / "other-run"))
    live.init(sync_dir=str(run))
    sync_llm(live.llm, 3, run_id=publisher.run_id)
    assert live.checksums() == three


def _until_taken(live: Engine, version: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            sync_llm(live.llm, version, stage_timeout_s=5, run_id=live.run_id)
        except CorruptFile:
            time.sleep(0.05)  # polling: leave the low-priority stager a core
            continue
        return
    pytest.fail("the repaired version was never taken")
