"""The main job on five architectures: published steps arrive bit for bit, stepwise and merged, by vLLM's
own loader and by scattering, and are served."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines import engine
from tests.support.tiny_models import ARCHITECTURES, make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive import sync_llm
from vllm_delta_snapshot.materialize import materialize
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_published_steps_are_served_exactly_as_by_a_fresh_engine(architecture: str, tmp_path: Path) -> None:
    base, sync_dir, final = tmp_path / "base", tmp_path / "run", tmp_path / "final"
    model = make_model(architecture, base)
    publisher = DeltaPublisher(model, sync_dir=str(sync_dir), base=base)

    with engine(base) as live:
        live.init(sync_dir=str(sync_dir), apply="loader")
        base_tokens, base_checksums = live.tokens(), live.checksums()
        for number in (1, 2):
            train_step(model, number)
            sync_llm(live.llm, publisher.publish(step=number).version, run_id=publisher.run_id)
        live.init(sync_dir=str(sync_dir), apply="scatter")
        for number in (3, 4, 5):  # missed by the engine: merged into one update
            train_step(model, number)
            publisher.publish(step=number)
        sync_llm(live.llm, 5, run_id=publisher.run_id)
        label, tokens, checksums = live.llm.get_weight_version(), live.tokens(), live.checksums()

    materialize(RunFolder(open_store(str(sync_dir))), Checkpoint(base), 5, final)
    with engine(final) as fresh:
        assert fresh.checksums() == checksums
        assert fresh.tokens() == tokens
    assert label == f"{publisher.run_id}@5"
    # The comparison means something: packed layers hash as empty, unchanged weights would be equal to anything.
    assert EMPTY_SHA256 not in checksums.values()
    assert [name for name, checksum in checksums.items() if checksum == base_checksums[name]] == []
    assert tokens != base_tokens
