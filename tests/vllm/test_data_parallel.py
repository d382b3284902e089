"""Two replicas behind one server: both take every version, and both are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines import PROMPTS
from tests.support.server import greedy, server
from tests.support.tiny_models import make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.drive import ServerError, sync_server, verify_server
from vllm_delta_snapshot.errors import VerifyError


def test_replicas_take_versions_together_and_go_back(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = make_model("qwen3", base)
    publisher = DeltaPublisher(model, sync_dir=str(tmp_path / "run"), base=base)
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "DELTA_SNAPSHOT_STAGE_DIR": str(tmp_path / "stage")}
    with server(base, tmp_path / "server.log", "--data-parallel-size", "2", **environment) as client:
        client.init(sync_dir=str(tmp_path / "run"))
        # Requests go to the replicas in turn: each prompt twice asks both.
        before = [[greedy(client, list(prompt), 12) for _ in range(2)] for prompt in PROMPTS]
        train_step(model, 1)
        sync_server(client, publisher.publish().version, run_id=publisher.run_id)
        verify_server(client)
        with pytest.raises(ServerError) as caught:
            verify_server(client, 0)
        assert caught.value.kind is VerifyError
        after = [[greedy(client, list(prompt), 12) for _ in range(2)] for prompt in PROMPTS]
        assert all(one == other for one, other in before + after)
        assert after != before
        sync_server(client, 0, allow_rollback=True, run_id=publisher.run_id)
        verify_server(client)
        assert [[greedy(client, list(prompt), 12) for _ in range(2)] for prompt in PROMPTS] == before
    areas = [path for path in (tmp_path / "stage").iterdir() if path.is_dir()]
    assert len(areas) == 1  # one stager, one download for both
