"""A tiny run anywhere that `open_store` reaches, and a host that follows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.support.checkpoints import write_checkpoint
from tests.support.runs import State, TinyTrainer
from tests.support.tensors import apply_by_hand
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.changes.decode import decode
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.host.area import StageArea, StagerConfig
from vllm_delta_snapshot.host.attachment import Attachment
from vllm_delta_snapshot.host.stager import Stager
from vllm_delta_snapshot.interop.openrl import read_folder_metadata
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store


@dataclass
class BucketRun:
    """See the module.

    Attributes:
        uri: its sync_dir.
        base: its base checkpoint.
        trainer: its trainer.
        history: the trainer's state at every version.
        publisher: made by `open`.
    """

    uri: str
    base: Path
    trainer: TinyTrainer
    history: list[State] = field(default_factory=list)
    publisher: DeltaPublisher | None = None
    _lost: State | None = None
    _steps: int = 0

    def open(self) -> DeltaPublisher:
        """Start a publisher, or start it again."""
        self.publisher = DeltaPublisher(self.trainer, sync_dir=self.uri, base=self.base, asynchronous=False)
        return self.publisher

    def publish(self) -> int:
        """Train one step and publish; return the version."""
        assert self.publisher is not None
        self._steps += 1
        self.trainer.step(self._steps)
        try:
            version = self.publisher.publish().version
        except BaseException:
            self._lost = self.trainer.state()
            raise
        if version == len(self.history) + 1 and self._lost is not None:
            self.history.append(self._lost)  # it was committed, although its trainer was told otherwise
        assert version == len(self.history)
        self.history.append(self.trainer.state())
        self._lost = None
        return version

    def materialized(self, version: int, out: Path) -> State:
        """Return the state at a version as materialize makes it."""
        materialize(RunFolder(open_store(self.uri)), Checkpoint(self.base), version, out)
        checkpoint = Checkpoint(out)
        return {name: checkpoint.bits(name) for name in checkpoint.specs}


def make_bucket_run(uri: str, folder: Path, versions: int = 1) -> BucketRun:
    """Publish versions into `uri`; the base checkpoint lies in `folder`."""
    trainer = TinyTrainer()
    run = BucketRun(uri, write_checkpoint(folder / "base", trainer.weights), trainer, [trainer.state()])
    run.open()
    for _ in range(versions):
        run.publish()
    return run


class BucketHost:
    """A host whose stager follows a run, and whose one worker takes what is staged.

    Args:
        run: the run.
        root: the folder for stage areas.
    """

    def __init__(self, run: BucketRun, root: Path) -> None:
        self._run = run
        config = StagerConfig(sync_dir=run.uri, checkpoint=str(run.base), retry_interval_s=1e-9)
        self.area = StageArea.of(root, config)
        self._worker = Attachment(self.area)
        self.version = 0
        self.weights = dict(run.history[0])
        self.start_stager()

    def start_stager(self) -> None:
        """Start a stager; the one before, if any, is as good as dead."""
        self.stager = Stager(self.area)
        self.stager.start()

    def step(self) -> dict[str, str | None] | None:
        """Do one round of the stager; return the error that it reports, if any."""
        self.stager.step()
        state = self.area.read_state()
        assert state is not None
        return state.error or (state.problem.error if state.problem else None)

    def is_staged(self, version: int) -> bool:
        """Say whether the update to a version is there."""
        return self.area.staged_folder(self.version, version).exists()

    def take(self, version: int) -> State:
        """Apply the update to a version by hand; return the weights."""
        folder = self.area.staged_folder(self.version, version)
        metadata = read_folder_metadata(folder)
        assert isinstance(metadata, DeltaMetadata)
        for change in decode(metadata, folder, RunFolder(open_store(self._run.uri)).read_run().specs()):
            self.weights[change.spec.name] = apply_by_hand(self.weights[change.spec.name], change)
        self._worker.tell(version, "")
        self.version = version
        return self.weights

    def close(self) -> None:
        """Detach the worker."""
        self._worker.close()
