"""An engine that serves one run and meets another of the same base: refused by name, and moved there on request."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.soak.expected import differing, live_digests
from tests.support.digests import parameters_in
from tests.support.engines import Engine, engine
from tests.support.tiny_models import make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive.local import repair_llm, sync_llm, verify_llm
from vllm_delta_snapshot.engine import switch
from vllm_delta_snapshot.errors import (
    BaseMismatch,
    CompatibilityError,
    DeltaSnapshotError,
    NotStaged,
    OutOfOrder,
    RunMismatch,
)
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store


class Run:
    """A trainer and its run."""

    def __init__(self, folder: Path, name: str, seed: int) -> None:
        import transformers

        self.base, self.sync_dir, self._seed = folder / "base", folder / name, seed
        self.model = transformers.AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        self.publisher = DeltaPublisher(self.model, sync_dir=str(self.sync_dir), base=self.base, asynchronous=False)

    def publish(self) -> int:
        train_step(self.model, self._seed + self.publisher.version)
        return self.publisher.publish().version

    def asked(self, version: int) -> dict[str, object]:
        digest = RunFolder(open_store(str(self.sync_dir))).state_digest(version)
        return {"version": version, "run": self.publisher.run_id, "digest": digest}


class Scene:
    """Two runs of one base, and an engine."""

    def __init__(self, folder: Path, live: Engine, a: Run, b: Run) -> None:
        self.folder, self.live, self.a, self.b = folder, live, a, b

    def ask(self, **info: object) -> None:
        self.live.llm.start_weight_update()
        self.live.llm.update_weights({"update_info": info})  # if it fails, vLLM closes the session
        self.live.llm.finish_weight_update()

    def sync(self, run: Run, version: int, **options: object) -> None:
        sync_llm(self.live.llm, version, run_id=run.publisher.run_id, stage_timeout_s=60, **options)

    def go_over(self, run: Run, version: int) -> None:
        request = {**run.asked(version), "sync_dir": str(run.sync_dir)}
        while True:
            try:
                self.ask(action="prepare_switch", **request)
            except NotStaged:
                continue
            break
        self.ask(action="switch", **request)

    def check(self, run: Run, version: int) -> None:
        """See that the live weights are those of this version, by every way of asking."""
        self.ask(action="confirm", **run.asked(version))
        verify_llm(self.live.llm)
        verify_llm(self.live.llm, version, run_id=run.publisher.run_id)
        assert differing(self.sums(run, version), parameters_in(self.live.checksums())) == []

    def sums(self, run: Run, version: int) -> dict[str, str]:
        out = self.folder / f"{run.sync_dir.name}@{version}"
        if not out.exists():
            materialize(RunFolder(open_store(str(run.sync_dir))), Checkpoint(run.base), version, out)
        return live_digests(out / "model.safetensors")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("runs")
    make_model("qwen3", folder / "base")
    a, b = Run(folder, "a", 100), Run(folder, "b", 200)
    with pytest.MonkeyPatch.context() as patched, engine(folder / "base") as live:
        patched.setenv("DELTA_SNAPSHOT_STAGE_DIR", str(folder / "stage"))
        live.init(sync_dir=str(a.sync_dir))
        yield Scene(folder, live, a, b)


@pytest.fixture(autouse=True)
def _own_stage_folder() -> None:
    """The engine's is the module's."""


def test_engine_refuses_a_version_of_another_run_whatever_its_number(scene: Scene) -> None:
    for _ in range(2):
        scene.a.publish()
    for _ in range(3):
        scene.b.publish()
    scene.sync(scene.a, 2)
    before = scene.live.checksums()
    for version in (1, 2, 3):
        for action in ("apply", "prepare", "staged", "confirm", "verify"):
            with pytest.raises(RunMismatch, match=rf"serves {scene.a.publisher.run_id}@2.*--switch-run"):
                scene.ask(action=action, **scene.b.asked(version))
    assert scene.live.checksums() == before
    scene.check(scene.a, 2)


def test_request_without_a_run_says_which_side_to_upgrade(scene: Scene) -> None:
    for action in ("apply", "prepare", "staged"):
        with pytest.raises(CompatibilityError, match="Upgrade vllm-delta-snapshot where the driver runs"):
            scene.ask(version=2, action=action)  # what drivers before 0.2 send


def test_same_version_with_another_state_is_refused(scene: Scene) -> None:
    asked = scene.a.asked(2) | {"digest": scene.a.asked(1)["digest"]}
    for action in ("apply", "prepare", "confirm"):
        with pytest.raises(RunMismatch, match="another version 2 than the one that this engine serves"):
            scene.ask(action=action, **asked)
    version = scene.a.publish()
    wrong = scene.a.asked(version) | {"digest": scene.a.asked(1)["digest"]}
    with pytest.raises(RunMismatch, match="another version 3 was staged"):
        scene.ask(action="apply", timeout_s=60, **wrong)


def test_confirm_fails_for_any_other_version(scene: Scene) -> None:
    with pytest.raises(OutOfOrder, match=rf"serves {scene.a.publisher.run_id}@2"):
        scene.ask(action="confirm", **scene.a.asked(1))


def test_engine_that_is_initialized_with_another_run_goes_on_following_its_own(scene: Scene) -> None:
    with pytest.raises(RunMismatch, match="version of another run"):
        scene.live.init(sync_dir=str(scene.b.sync_dir))
    scene.sync(scene.a, 3)
    scene.check(scene.a, 3)


def test_engine_goes_over_and_back_exactly(scene: Scene) -> None:
    for run, version in ((scene.b, 3), (scene.a, 2), (scene.b, 0), (scene.a, 0), (scene.b, 1)):
        scene.go_over(run, version)
        scene.check(run, version)
    scene.sync(scene.b, 3)
    scene.check(scene.b, 3)
    scene.sync(scene.b, 2, allow_rollback=True)
    scene.check(scene.b, 2)
    repair_llm(scene.live.llm)
    scene.check(scene.b, 2)
    scene.live.init(sync_dir=str(scene.b.sync_dir))  # a trainer that restarted
    scene.check(scene.b, 2)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_failure_on_the_way_leaves_the_engine_where_it_was(
    scene: Scene, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.go_over(scene.a, 2)
    count = 0
    plain = switch.PreparedUpdate.commit

    def fail(update: switch.PreparedUpdate, *rest: object) -> None:
        nonlocal count
        count += 1
        plain(update, *rest)
        if count == fails_at:
            update.undo(rest[0])
            raise DeltaSnapshotError("broken off")

    before = scene.live.checksums()
    with monkeypatch.context() as patched:
        patched.setattr(switch.PreparedUpdate, "commit", fail)
        with pytest.raises(DeltaSnapshotError, match="broken off"):
            scene.go_over(scene.b, 3)
    assert count == fails_at
    assert scene.live.checksums() == before
    scene.check(scene.a, 2)
    scene.sync(scene.a, 3)
    scene.go_over(scene.b, 3)
    scene.check(scene.b, 3)


def test_run_of_another_base_is_refused_before_anything_moves(scene: Scene, tmp_path: Path) -> None:
    make_model("qwen3", tmp_path / "base", seed=7)
    other = Run(tmp_path, "other", 300)
    version = other.publish()
    before = scene.live.checksums()
    with pytest.raises(BaseMismatch, match="neither the base of the run nor one of its versions"):
        scene.go_over(other, version)
    assert scene.live.checksums() == before
    scene.check(scene.b, 3)


def test_run_that_was_begun_anew_in_the_same_folder_is_refused_and_named(scene: Scene, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    scene.b.sync_dir.rename(kept)
    anew = Run(scene.folder, "b", 400)
    version = anew.publish()
    with pytest.raises(RunMismatch, match=r"no longer in its folder: another one was begun there.*Restart the engine"):
        scene.go_over(anew, version)
    shutil.rmtree(scene.b.sync_dir)
    kept.rename(scene.b.sync_dir)
    scene.check(scene.b, 3)
