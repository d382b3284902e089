"""An engine that starts when most deltas of the run are gone catches up from an anchor, in one pause."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines import engine
from tests.support.tiny_models import make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive import sync_llm, verify_llm
from vllm_delta_snapshot.errors import BrokenChain
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.upkeep.anchor import write_anchor
from vllm_delta_snapshot.upkeep.compact import compact
from vllm_delta_snapshot.upkeep.retention import RetentionPolicy, plan_pruning, prune


def test_late_engine_catches_up_from_an_anchor_in_one_pause_and_one_left_behind_is_told(tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    model = make_model("qwen3", base)
    publisher = DeltaPublisher(model, sync_dir=str(run), base=base)
    folder = RunFolder(PosixStore(run))

    def publish(first: int, last: int) -> None:
        for number in range(first, last + 1):
            train_step(model, number)
            publisher.publish().wait()

    publish(1, 2)
    with engine(base) as left_behind:
        left_behind.init(sync_dir=str(run))
        sync_llm(left_behind.llm, 2, run_id=publisher.run_id)
        old = left_behind.checksums()
        left_behind.shutdown_transfer()
        publish(3, 7)
        write_anchor(folder, Checkpoint(base), 5)
        compact(folder, 5, 7)
        prune(folder, plan_pruning(folder, RetentionPolicy(keep_versions=2)))
        left_behind.init(sync_dir=str(run))
        with pytest.raises(BrokenChain, match="restart this one"):
            sync_llm(left_behind.llm, 7, stage_timeout_s=20, run_id=publisher.run_id)
        assert left_behind.checksums() == old
        left_behind.shutdown_transfer()
    with engine(base) as late:
        late.init(sync_dir=str(run))
        assert sync_llm(late.llm, 7, stage_timeout_s=60, run_id=publisher.run_id).version == 7
        verify_llm(late.llm)
        publish(8, 8)
        sync_llm(late.llm, 8, stage_timeout_s=60, run_id=publisher.run_id)
        found = late.checksums()
    made = materialize(folder, None, 8, tmp_path / "eight")
    with engine(Path(made.folder)) as fresh:
        assert fresh.checksums() == found
