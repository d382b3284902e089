"""Trainer and sampler in two networks joined by a link of 100 Mbit/s: an S3 server is all that both see."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.follower import follower
from tests.support.object_stores import ministack
from tests.support.server import ServerProcess, servers
from tests.support.tiny_models import make_model, train_step
from tools.two_sides import two_sides, why_not
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.drive.sync import verify_server

_WHY_NOT = why_not()


@pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))
def test_sampler_behind_a_slow_link_follows_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    model = make_model("qwen3", base)
    with ExitStack() as ends:
        sides = ends.enter_context(two_sides(mbit=100))
        with sides.near():
            store = ends.enter_context(ministack(tmp_path / "s3.log", sides.near_address))
            for name, value in store.environment.items():
                monkeypatch.setenv(name, value)
            sync_dir = f"s3://{store.make_bucket()}/run"
            publisher = ends.enter_context(DeltaPublisher(model, sync_dir=sync_dir, base=base))
        with sides.far():
            engine = ServerProcess(base, tmp_path / "vllm.log")
            ends.enter_context(servers(engine))
            ends.enter_context(
                follower(sync_dir, engine.client.url, tmp_path / "follow.log", "--sampler", "far", "--max-lag", "0")
            )
        for number in (1, 2, 3):
            with sides.near():
                train_step(model, number)
                publisher.publish(step=number)
                assert publisher.wait_applied(["far"], timeout_s=120)["far"].version == number
        with sides.far():
            verify_server(engine.client, 3)
