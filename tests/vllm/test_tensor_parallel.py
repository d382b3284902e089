"""Two workers: each takes its part, all take the same version, and a refusal leaves vLLM's worker channel in step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.digests import unchanged
from tests.support.engines import PROMPTS
from tests.support.server import greedy, server
from tests.support.stagers import area_in, downloads, the_stager
from tests.support.tiny_models import make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.drive import ServerError, sync_server
from vllm_delta_snapshot.errors import NotStaged, OutOfOrder

OPTIONS = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")


def test_two_workers_take_versions_exactly_and_refuse_together(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = make_model("qwen3_moe", base)
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    publisher = DeltaPublisher(model, sync_dir=str(tmp_path / "run"), base=base)
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "DELTA_SNAPSHOT_STAGE_DIR": str(tmp_path / "stage")}
    with server(base, tmp_path / "server.log", *OPTIONS, **environment) as client:
        client.init(sync_dir=str(tmp_path / "run"))
        before = (client.checksums(), [greedy(client, list(prompt), 16) for prompt in PROMPTS])
        train_step(model, 1, density=0.5)
        sync_server(client, publisher.publish().version, run_id=publisher.run_id)
        trained = client.checksums()
        assert unchanged(before[0], trained) == []

        for version, kind in ((9, NotStaged), (0, OutOfOrder)):
            with pytest.raises(ServerError) as caught:
                sync_server(client, version, stage_timeout_s=0.5, run_id=publisher.run_id)
            assert caught.value.kind is kind
            # A worker's answer left unread would be taken for one to this call.
            assert client.checksums() == trained

        # Back to the weights that vLLM's own loader had put there: every slice must land where it came from.
        with torch.no_grad():
            model.load_state_dict(original)
        sync_server(client, publisher.publish().version, run_id=publisher.run_id)
        assert client.checksums() == before[0]
        assert [greedy(client, list(prompt), 16) for prompt in PROMPTS] == before[1]
        assert client.weight_version() == f"{publisher.run_id}@2"
        area = area_in(tmp_path / "stage")
        assert the_stager(area)
    assert downloads(area) == [1, 2]  # one for both workers
