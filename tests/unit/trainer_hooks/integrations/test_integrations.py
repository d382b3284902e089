"""What the adapters share: who publishes, who brings engines to a version, and what is told when that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import write_checkpoint
from tests.support.runs import TinyTrainer
from tests.support.stub_server import EngineStub, answering
from trainer_hooks.integrations.handshake import ClientFleet
from trainer_hooks.integrations.rounds import Rounds, is_sharded
from vllm_delta_snapshot.drive import DeltaSync, ServerClient, ServerError
from vllm_delta_snapshot.errors import (
    ApplyError,
    BaseMismatch,
    NotStaged,
    SourceError,
    StageError,
    WeightsUncertain,
)
from vllm_delta_snapshot.runs.acks import Acknowledger
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store


class Client:
    """vLLM's four methods over HTTP: what it calls a `VLLMWeightSyncClient`."""

    def __init__(self, url: str) -> None:
        self.server = ServerClient(url)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.server.init(**init_info)

    def start_weight_update(self) -> None:
        self.server.start_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self.server.update(**update_info)
        except ServerError as error:  # clients raise what they like, with the server's words in it
            raise RuntimeError(f"the call failed [500]: {error.found}") from None

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.server.finish_update(weight_version)


class PausingClient(Client):
    """And what SkyRL's can do besides."""

    def pause_generation(self) -> None:
        self.server.pause("keep")

    def resume_generation(self) -> None:
        self.server.resume()

    def reset_prefix_cache(self, reset_running_requests: bool = True) -> None:
        self.server.reset_caches(running_requests=reset_running_requests)


@pytest.fixture
def stub() -> Iterator[EngineStub]:
    with answering(EngineStub()) as found:
        yield found


def fleet_of(stub: EngineStub, kind: type[Client] = PausingClient, **more: Any) -> ClientFleet:
    return ClientFleet(kind(stub.url), {"sync_dir": "/run"}, **more)


def order(stub: EngineStub) -> list[str]:
    """Return what the engine was asked between pause and resume, and these."""
    wanted = {"/pause?mode=keep": "pause", "/resume": "resume", "/reset_mm_cache": "reset", "/update_weights": "update"}
    return [
        f"{wanted[path]} {body['update_info']['action']}" if body else wanted[path]
        for _, path, body in stub.asked
        if path in wanted
    ]


def test_client_that_can_is_used_to_pause_and_staging_is_before_it(stub: EngineStub) -> None:
    stub.failing["prepare"] = ["NotStaged", None]
    fleet_of(stub).sync(3, run_id="r").check()
    asked = ["update prepare", "update prepare", "pause", "update apply", "reset", "resume"]
    assert order(stub) == asked
    assert stub.label == "r@3"


def test_client_that_cannot_pause_is_refused_unless_the_caller_does_it(stub: EngineStub) -> None:
    with pytest.raises(ApplyError, match="prefixes of old weights") as caught:
        fleet_of(stub, Client)
    assert "DeltaSync" in str(caught.value)
    fleet_of(stub, Client, resets_caches=True).sync(3)
    assert order(stub) == ["update prepare", "update apply"]
    assert stub.label == "3"


def test_restarted_engine_is_initialized_again(stub: EngineStub) -> None:
    stub.restart()
    fleet_of(stub).sync(3, run_id="r")
    assert ("POST", "/init_weight_transfer_engine", {"init_info": {"sync_dir": "/run"}}) in stub.asked
    assert stub.label == "r@3"


def test_refusal_before_the_pause_keeps_its_kind_and_pauses_nothing(stub: EngineStub) -> None:
    stub.always["prepare"] = "BaseMismatch"
    with pytest.raises(BaseMismatch, match="it broke"):
        fleet_of(stub).sync(3)
    assert order(stub) == ["update prepare"]


def test_version_that_is_never_staged_is_not_waited_for_for_ever(stub: EngineStub) -> None:
    stub.always["prepare"] = "NotStaged"
    with pytest.raises(NotStaged):
        fleet_of(stub, stage_timeout_s=0.05).sync(3)


def test_engine_that_refuses_in_the_pause_is_resumed_if_it_vouches_for_its_weights(stub: EngineStub) -> None:
    stub.always["apply"] = "ApplyError"
    with pytest.raises(ApplyError):
        fleet_of(stub).sync(3, run_id="r")
    assert order(stub)[1:] == ["pause", "update apply", "update check", "resume"]
    assert stub.label == "default"


def test_engine_that_does_not_vouch_for_its_weights_stays_paused(stub: EngineStub) -> None:
    stub.always |= {"apply": "WeightsUncertain", "check": "WeightsUncertain"}
    with pytest.raises(WeightsUncertain):
        fleet_of(stub).sync(3, run_id="r")
    assert order(stub)[1:] == ["pause", "update apply", "update check"]


def rounds_of(folder: Path, **more: Any) -> tuple[TinyTrainer, Rounds]:
    trainer = TinyTrainer()
    base = folder / "base"
    write_checkpoint(base, trainer.weights)
    return trainer, Rounds(trainer, sync_dir=str(folder / "run"), base=base, **({"is_first": True} | more))


def test_other_ranks_of_a_whole_model_publish_nothing(tmp_path: Path) -> None:
    _, rounds = rounds_of(tmp_path, is_first=False)
    assert rounds.publish(step=1) is None
    assert rounds.version is None
    rounds.close()
    assert not (tmp_path / "run").exists()


def test_engines_that_do_not_answer_are_an_error_or_a_warning(tmp_path: Path, stub: EngineStub) -> None:
    stub.is_gone = True
    fleet = DeltaSync([stub.url], connect_timeout_s=0.2, retries=0)
    trainer, rounds = rounds_of(tmp_path, fleet=fleet)
    trainer.step(1)
    with pytest.raises(ApplyError, match="1 of 1 servers do not serve version 1"), rounds:
        rounds.publish()
    lenient = Rounds(
        trainer, sync_dir=str(tmp_path / "run"), base=tmp_path / "base", is_first=True, fleet=fleet, strict=False
    )
    publication = lenient.publish(step=2)
    assert publication is not None
    assert publication.wait().version == lenient.version == 2
    lenient.close()


def test_samplers_in_follow_mode_are_waited_for(tmp_path: Path) -> None:
    _, rounds = rounds_of(tmp_path, samplers=["one"], wait_s=0.05)
    with pytest.raises(StageError, match="one"):
        rounds.publish()
    assert rounds.publisher is not None
    store = open_store(str(tmp_path / "run"))
    Acknowledger(store, rounds.publisher.run_id, "one").write(2, pause_s=0.0)
    assert rounds.publish() is not None
    assert rounds.version == 2
    rounds.close()


def test_model_with_adapters_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    model.peft_config = {}  # as PeftModel has it
    with pytest.raises(SourceError, match="PEFT"):
        Rounds(model, sync_dir="/nowhere", base="/nowhere", is_first=True)


def test_sharded_models_are_told_from_whole_ones() -> None:
    model = torch.nn.Linear(2, 2)
    assert not is_sharded(model)
    assert not is_sharded({"a": model.weight})
    model.weight.ds_shape = (2, 2)  # as ZeRO-3 leaves it
    assert is_sharded(model)


def test_round_that_was_skipped_is_published_at_the_end(tmp_path: Path) -> None:
    trainer, rounds = rounds_of(tmp_path, when_busy="merge")
    with rounds:
        for number in range(1, 20):
            trainer.step(number)
            rounds.publish(step=number)
    rounds.close()
    run = RunFolder(open_store(str(tmp_path / "run")))
    newest = run.versions()[-1]
    assert run.read_metadata(run.read_version(newest)).step == 19
