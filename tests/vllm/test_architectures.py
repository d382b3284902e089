"""The main job on eleven architectures: published steps arrive bit for bit, stepwise and merged, by vLLM's loader and
by scattering, and are served; an update that is interrupted at any storage is undone, and going back is exact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.digests import unchanged
from tests.support.engines import Engine, engine
from tests.support.tiny_models import ARCHITECTURES, OPTIONS, WEIGHTS_ONLY, make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive import sync_llm, verify_llm
from vllm_delta_snapshot.engine.write import transaction
from vllm_delta_snapshot.engine.write.lanes import LiveLane, write_lanes
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_published_steps_are_served_exactly_as_by_a_fresh_engine(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, sync_dir, final = tmp_path / "base", tmp_path / "run", tmp_path / "final"
    model = make_model(architecture, base)
    publisher = DeltaPublisher(model, sync_dir=str(sync_dir), base=base, asynchronous=False)
    assert publisher.version == 0  # a run that allows every encoding
    publisher = DeltaPublisher(model, sync_dir=str(sync_dir), base=base, encoding="absolute", asynchronous=False)
    generates = architecture not in WEIGHTS_ONLY

    options = OPTIONS.get(architecture, {})
    with engine(base, **options) as live:
        live.init(sync_dir=str(sync_dir), apply="loader")
        base_tokens, base_checksums = live.tokens() if generates else [], live.checksums()
        for number in (1, 2):
            train_step(model, number)
            sync_llm(live.llm, publisher.publish(step=number).version, run_id=publisher.run_id)
        live.init(sync_dir=str(sync_dir), apply="scatter")
        for number in (3, 4, 5):  # missed by the engine: merged into one update, of absolute values and differences
            train_step(model, number)
            publisher.publish(step=number)
            publisher = DeltaPublisher(model, sync_dir=str(sync_dir), base=base, encoding="auto", asynchronous=False)
        _undoes_interrupted_updates(live, 5, monkeypatch)
        sync_llm(live.llm, 5, run_id=publisher.run_id)
        label, tokens, checksums = live.llm.get_weight_version(), live.tokens() if generates else [], live.checksums()
        verify_llm(live.llm)
        sync_llm(live.llm, 0, allow_rollback=True, run_id=publisher.run_id)
        assert live.checksums() == base_checksums
        assert (live.tokens() if generates else []) == base_tokens

    materialize(RunFolder(open_store(str(sync_dir))), Checkpoint(base), 5, final)
    with engine(final, **options) as fresh:
        assert fresh.checksums() == checksums
        assert (fresh.tokens() if generates else []) == tokens
    assert label == f"{publisher.run_id}@5"
    # The comparison means something: packed layers hash as empty, unchanged weights would be equal to anything.
    assert EMPTY_SHA256 not in checksums.values()
    assert unchanged(base_checksums, checksums) == []
    assert tokens != base_tokens or not generates


def _undoes_interrupted_updates(live: Engine, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break off the update after each of its storages in turn, half of the next one written."""
    before = live.checksums()
    live.backend._handoff.wait(live.backend._at.version, version, timeout_s=60)
    plain = transaction.apply
    interrupted = 0
    while True:

        def break_off(model: Any, lanes: Sequence[LiveLane], *rest: Any, count: int = interrupted) -> None:
            if count == len(lanes):
                plain(model, lanes, *rest)
                return
            write_lanes(lanes[:count])
            lanes[count].flat[lanes[count].index[::2]] = lanes[count].new[::2]
            raise RuntimeError("interrupted")

        with monkeypatch.context() as patched:
            patched.setattr(transaction, "apply", break_off)
            live.llm.start_weight_update()
            try:
                live.llm.update_weights({"update_info": {"version": version, "run": live.run_id}})
            except RuntimeError as error:
                assert "interrupted" in str(error)  # noqa: PT017 - the loop ends when nothing is raised any more
            else:
                break
        assert live.checksums() == before
        interrupted += 1
    live.llm.finish_weight_update()
    assert interrupted > 10
    assert live.checksums() != before
