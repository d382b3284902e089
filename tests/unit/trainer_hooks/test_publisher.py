"""`DeltaPublisher`: what is published is the trainer's weights, every bit, once."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.checkpoints import TINY_SPECS, snapshot_of, tiny_tensors, write_checkpoint
from tests.support.kernels import compiled
from tests.support.runs import State, TinyTrainer, assert_same_state, make_run, replay
from tests.support.stub_server import EngineStub, answering
from tests.support.tensors import bits_of, random_bits
from trainer_hooks import DeltaPublisher, IterableSource, ModuleSource, SourceItem
from trainer_hooks.publication.kept import KeptChanges
from vllm_delta_snapshot.drive import DeltaSync
from vllm_delta_snapshot.errors import CompatibilityError, ObjectNotFound, SourceError, StageError
from vllm_delta_snapshot.format.choose import POLICIES
from vllm_delta_snapshot.format.encodings import encoding_of
from vllm_delta_snapshot.runs.acks import Acknowledger
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.types import TensorSpec

TOTAL = sum(spec.numel for spec in TINY_SPECS)


@pytest.fixture
def trainer() -> TinyTrainer:
    return TinyTrainer()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", tiny_tensors())


def open_publisher(source: object, tmp_path: Path, **options: object) -> DeltaPublisher:
    options = {"asynchronous": False} | options
    return DeltaPublisher(source, sync_dir=str(tmp_path / "run"), base=tmp_path / "base", **options)


def states(tmp_path: Path) -> list[State]:
    return replay(tmp_path / "run", tmp_path / "base", tmp_path)


@pytest.mark.parametrize("encoding", POLICIES)
@pytest.mark.parametrize("max_file_bytes", [None, 100, 1], ids=["one file", "some files", "a file each"])
def test_every_version_has_the_trainers_weights(tmp_path: Path, max_file_bytes: int | None, encoding: str):
    run = make_run(tmp_path, 5, max_file_bytes=max_file_bytes, encoding=encoding)
    for found, expected in zip(states(tmp_path), run.history, strict=True):
        assert_same_state(found, expected)


def test_small_moves_are_published_as_differences_and_others_as_they_are(tmp_path: Path):
    run = make_run(tmp_path, 4)
    is_difference = {
        (version, entry.name): encoding_of(entry.encoding).is_difference
        for version in range(1, 5)
        for entry in run.metadata(version).tensors
    }
    for place, spec in enumerate(TINY_SPECS):
        for version in range(1, 5):
            if spec.numel > 10 and (place + version) % 2 == 0:
                assert is_difference[version, spec.name] is ((place + version) % 4 == 0)


def published(folder: Path, threads: int, encoding: str) -> list[object]:
    """Publish three versions, each of several files and pieces; return all that is in them but ids and times."""
    run = make_run(folder, 0)
    options = {"threads": threads, "encoding": encoding, "max_file_bytes": 200, "asynchronous": False}
    publisher = DeltaPublisher(run.trainer, sync_dir=str(folder / "again"), base=run.base, **options)
    reader = RunFolder(PosixStore(folder / "again"))
    said: list[object] = []
    for number in (1, 2, 3):
        run.trainer.step(number)
        run.trainer.step(number + 1)
        report = publisher.publish(step=number).report
        metadata = reader.read_metadata(reader.read_version(report.version))
        own = {"run_id", "publication_id", "base_model", "created_at", "timestamp", "timings"}
        files = snapshot_of(folder / "again" / report.folder)
        said.append({name: data for name, data in files.items() if name != "metadata.json"})
        said.append(metadata.model_dump(exclude=own))
        said.append(replace(report, run_id="", folder="", diff_s=0.0, total_s=0.0, blocked_s=0.0))
    return said


@pytest.mark.parametrize("encoding", ["auto", "difference", "raw"])
def test_number_of_threads_makes_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str):
    monkeypatch.setattr("trainer_hooks.compare.diff.CHUNK_ELEMENTS", 8)
    monkeypatch.setattr("trainer_hooks.compare.diff.PIECE_ELEMENTS", 16)
    monkeypatch.setattr("trainer_hooks.compare.diff._OF_THREAD", threading.local())
    one = published(tmp_path / "one", 1, encoding)
    assert one == published(tmp_path / "two", 2, encoding)
    assert one == published(tmp_path / "five", 5, encoding)


@pytest.mark.slow
def test_kernel_makes_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kernel = compiled()
    without = published(tmp_path / "without", 2, "auto")
    monkeypatch.setattr("trainer_hooks.compare.diff.load_kernel", lambda: kernel)
    assert published(tmp_path / "with", 2, "auto") == without


def test_tensor_of_several_pieces_is_one_tensor_of_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer_hooks.compare.diff.PIECE_ELEMENTS", 10)
    monkeypatch.setattr("trainer_hooks.compare.diff.CHUNK_ELEMENTS", 10)
    monkeypatch.setattr("trainer_hooks.compare.diff._OF_THREAD", threading.local())
    trainer = TinyTrainer()
    write_checkpoint(tmp_path / "base", trainer.weights)
    publisher = open_publisher(trainer, tmp_path)
    name = TINY_SPECS[0].name
    trainer.poke(name, np.array([0, 9, 10, 55, 103]), trainer.state()[name][[0, 9, 10, 55, 103]] + np.uint16(1))
    report = publisher.publish().report
    assert (report.changed_tensors, report.changed_elements) == (1, 5)
    assert_same_state(states(tmp_path)[1], trainer.state())


@pytest.mark.parametrize("encoding", ["auto", "difference"])
def test_changes_that_are_kept_encoded_move_the_baseline_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
):
    monkeypatch.setattr("trainer_hooks.publication.whole_writing.KeptChanges", partial(KeptChanges, 0))
    run = make_run(tmp_path, 6, encoding=encoding)
    for found, expected in zip(states(tmp_path), run.history, strict=True):
        assert_same_state(found, expected)
    assert run.publisher.publish().report.changed_elements == 0


def test_failed_tensor_publishes_nothing_of_those_before_it(tmp_path: Path, base: Path, trainer: TinyTrainer):
    publisher = open_publisher(trainer, tmp_path, max_file_bytes=1)
    trainer.step(1)
    last = trainer.weights["model.norm.weight"]
    trainer.weights["model.norm.weight"] = torch.zeros(9)
    with pytest.raises(SourceError, match="another shape"):
        publisher.publish()
    assert publisher.version == 0
    trainer.weights["model.norm.weight"] = last
    publisher.publish()
    assert_same_state(states(tmp_path)[-1], trainer.state())


def test_first_version_carries_what_changed_since_the_base(tmp_path: Path, base: Path, trainer: TinyTrainer):
    trainer.step(1)
    open_publisher(trainer, tmp_path).publish()
    assert_same_state(states(tmp_path)[1], trainer.state())


def test_two_steps_between_publications_lose_nothing(tmp_path: Path, base: Path, trainer: TinyTrainer):
    publisher = open_publisher(trainer, tmp_path)
    trainer.step(1)
    trainer.step(2)
    publisher.publish()
    assert_same_state(states(tmp_path)[1], trainer.state())


def test_change_and_back_between_publications_is_no_change(tmp_path: Path, base: Path, trainer: TinyTrainer):
    publisher = open_publisher(trainer, tmp_path)
    trainer.step(1)
    trainer.weights = tiny_tensors()
    assert publisher.publish().report.changed_elements == 0


def test_unchanged_model_is_a_valid_empty_version(tmp_path: Path, base: Path, trainer: TinyTrainer):
    publisher = open_publisher(trainer, tmp_path)
    report = publisher.publish().report
    assert (report.version, report.changed_elements, report.changed_tensors, report.density) == (1, 0, 0, 0.0)
    assert_same_state(states(tmp_path)[1], trainer.state())


def test_report_counts_what_changed(tmp_path: Path, base: Path, trainer: TinyTrainer):
    publisher = open_publisher(trainer, tmp_path)
    name = TINY_SPECS[0].name
    old = trainer.state()[name]
    trainer.poke(name, np.array([3, 7]), old[[3, 7]] ^ np.uint16(1))
    report = publisher.publish(step=17).report
    assert (report.changed_elements, report.changed_tensors, report.total_elements) == (2, 1, TOTAL)
    assert report.density == 2 / TOTAL
    assert report.checkpoint_bytes == sum(spec.num_bytes for spec in TINY_SPECS)
    folder = tmp_path / "run" / report.folder
    assert report.payload_bytes == (folder / "delta.safetensors").stat().st_size
    assert 0 <= report.diff_s <= report.total_s


def test_handle_has_version_and_report(tmp_path: Path, base: Path, trainer: TinyTrainer):
    publication = open_publisher(trainer, tmp_path).publish()
    assert publication.version == 1
    assert publication.wait() is publication.report


def test_metadata_records_step_metrics_and_base(tmp_path: Path, base: Path, trainer: TinyTrainer):
    open_publisher(trainer, tmp_path).publish(step=17, metrics={"reward": 0.5})
    folder = RunFolder(PosixStore(tmp_path / "run"))
    metadata = folder.read_metadata(folder.read_version(1))
    assert (metadata.step, metadata.metrics, metadata.base_model) == (17, {"reward": 0.5}, str(base))


def test_state_digest_is_that_of_the_trainers_weights(tmp_path: Path):
    run = make_run(tmp_path, 3)
    digest = run.publisher.state_digest
    check = write_checkpoint(tmp_path / "check", run.trainer.weights)
    other = DeltaPublisher(run.trainer, sync_dir=str(tmp_path / "other"), base=check)
    assert other.state_digest == digest == run.record(3).state_digest


def test_sync_dir_as_file_uri_is_the_same_run(tmp_path: Path, base: Path, trainer: TinyTrainer):
    first = open_publisher(trainer, tmp_path)
    again = DeltaPublisher(trainer, sync_dir=f"file://{tmp_path}/run", base=str(base))
    assert again.run_id == first.run_id


def test_base_is_not_touched(tmp_path: Path, base: Path):
    before = snapshot_of(base)
    make_run(tmp_path, 2)
    assert snapshot_of(base) == before


def test_publisher_logs_open_and_publish(
    tmp_path: Path, base: Path, trainer: TinyTrainer, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, logger="trainer_hooks"):
        open_publisher(trainer, tmp_path).publish()
    opened, published = (record.getMessage() for record in caplog.records)
    assert opened.startswith("opened run=")
    assert published.startswith("published version=1 changed=0")


Change = Callable[[dict[str, torch.Tensor]], object]
WRONG_NAMES: dict[str, tuple[Change, str]] = {
    "missing": (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
    "unknown": (lambda w: w.update(extra=torch.zeros(1)), "extra is not in the base checkpoint"),
}


@pytest.mark.parametrize(("change", "message"), WRONG_NAMES.values(), ids=WRONG_NAMES)
def test_wrong_names_at_the_start_are_refused_and_make_no_run(tmp_path: Path, base: Path, change: Change, message: str):
    weights = tiny_tensors()
    change(weights)
    with pytest.raises(SourceError, match=message):
        open_publisher(weights, tmp_path)
    assert not (tmp_path / "run").exists()


def test_doubled_name_at_the_start_is_refused(tmp_path: Path, base: Path):
    doubled = [*tiny_tensors().items(), ("model.norm.weight", torch.zeros(8))]
    with pytest.raises(SourceError, match=r"model\.norm\.weight comes 2 times"):
        open_publisher(doubled, tmp_path)


@pytest.mark.parametrize(("change", "message"), WRONG_NAMES.values(), ids=WRONG_NAMES)
def test_wrong_names_later_are_refused_and_publish_nothing(
    tmp_path: Path, base: Path, trainer: TinyTrainer, change: Change, message: str
):
    publisher = open_publisher(trainer, tmp_path)
    before = snapshot_of(tmp_path / "run")
    good = dict(trainer.weights)
    change(trainer.weights)
    with pytest.raises(SourceError, match=r"extra|missing"):
        publisher.publish()
    assert snapshot_of(tmp_path / "run") == before
    trainer.weights = good
    trainer.step(1)
    publisher.publish()
    assert_same_state(states(tmp_path)[1], trainer.state())


def test_doubled_name_later_is_refused(tmp_path: Path, base: Path):
    pairs = list(tiny_tensors().items())
    publisher = open_publisher(lambda: iter(pairs), tmp_path)
    pairs.append(pairs[0])
    with pytest.raises(SourceError, match="comes 2 times"):
        publisher.publish()


def test_foreign_model_names_only_a_few_of_its_misfits(tmp_path: Path, base: Path):
    with pytest.raises(SourceError, match="and 999 more") as caught:
        open_publisher({f"w{i}": torch.zeros(1) for i in range(1000)}, tmp_path)
    assert len(str(caught.value)) < 1000


def test_shape_that_changed_is_refused_and_publishes_nothing(tmp_path: Path, base: Path, trainer: TinyTrainer):
    publisher = open_publisher(trainer, tmp_path)
    trainer.weights["model.norm.weight"] = torch.zeros(9)
    with pytest.raises(SourceError, match="another shape"):
        publisher.publish()
    assert RunFolder(PosixStore(tmp_path / "run")).versions() == []


def test_one_shot_iterator_is_refused(tmp_path: Path, base: Path, trainer: TinyTrainer):
    with pytest.raises(SourceError, match="only once"):
        open_publisher(trainer(), tmp_path)


def test_missing_base_is_not_found_and_makes_no_run(tmp_path: Path, trainer: TinyTrainer):
    with pytest.raises(ObjectNotFound):
        open_publisher(trainer, tmp_path)
    assert not (tmp_path / "run").exists()


def test_sync_dir_that_cannot_be_opened_is_refused(tmp_path: Path, base: Path, trainer: TinyTrainer):
    with pytest.raises(CompatibilityError):
        DeltaPublisher(trainer, sync_dir="ftp://host/run", base=base)


class CountingSource:
    """A module's source that counts how often every tensor is read."""

    def __init__(self, module: nn.Module, *, skip_frozen: bool = True) -> None:
        self.source = ModuleSource(module, skip_frozen=skip_frozen)
        self.reads: Counter[str] = Counter()

    def items(self, specs: Mapping[str, TensorSpec]) -> Iterator[SourceItem]:
        for item in self.source.items(specs):
            yield replace(item, load=self._counted(item))

    def _counted(self, item: SourceItem) -> Callable[[], object]:
        def load() -> object:
            self.reads.update(item.names)
            return item.load()

        return load

    def read_by(self, action: Callable[[], object]) -> set[str]:
        """Return the names that an action read."""
        self.reads.clear()
        action()
        assert set(self.reads.values()) <= {1}
        return set(self.reads)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cold = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        self.warm = nn.Parameter(torch.randn(4))


def frozen_publisher(tmp_path: Path, *, skip_frozen: bool = True) -> tuple[Frozen, CountingSource, DeltaPublisher]:
    module = Frozen()
    write_checkpoint(tmp_path / "base", {name: p.detach().clone() for name, p in module.named_parameters()})
    source = CountingSource(module, skip_frozen=skip_frozen)
    return module, source, open_publisher(source, tmp_path)


def test_everything_is_read_by_every_publication(tmp_path: Path):
    _, source, publisher = frozen_publisher(tmp_path, skip_frozen=False)
    for _ in range(3):
        assert source.read_by(publisher.publish) == {"cold", "warm"}


def test_frozen_parameter_is_read_once_and_then_skipped_where_that_is_asked_for(tmp_path: Path):
    _, source, publisher = frozen_publisher(tmp_path)
    assert source.read_by(publisher.publish) == {"cold", "warm"}
    assert source.read_by(publisher.publish) == {"warm"}
    assert source.read_by(publisher.publish) == {"warm"}


COLD_CHANGES: dict[str, Callable[[Frozen], object]] = {
    "in place": lambda m: m.cold.add_(1),
    "in place at one element": lambda m: m.cold.view(-1).__setitem__(5, 1.0),
    "replaced": lambda m: setattr(m, "cold", nn.Parameter(m.cold + 1, requires_grad=False)),
    "data replaced": lambda m: setattr(m.cold, "data", m.cold + 1),
    "loaded": lambda m: m.load_state_dict({"cold": m.cold + 1, "warm": m.warm}),
    "unfrozen": lambda m: m.cold.requires_grad_(True).data.add_(1),
}


@pytest.mark.parametrize("change", COLD_CHANGES.values(), ids=COLD_CHANGES)
def test_frozen_parameter_that_changed_is_read_and_published(tmp_path: Path, change: Callable[[Frozen], object]):
    module, source, publisher = frozen_publisher(tmp_path)
    publisher.publish()
    change(module)
    assert "cold" in source.read_by(publisher.publish)
    assert states(tmp_path)[-1]["cold"].tolist() == bits_of(module.cold).tolist()


def test_frozen_parameter_replaced_twice_between_publications_is_published(tmp_path: Path):
    module, _, publisher = frozen_publisher(tmp_path)
    for number in range(6):
        for half in (0.0, 0.5):
            module.cold = nn.Parameter(torch.full((64, 64), number + half), requires_grad=False)
        publisher.publish()
    for number, state in enumerate(states(tmp_path)[1:]):
        assert set(state["cold"].view(np.float32).tolist()) == {number + 0.5}


def test_frozen_again_parameter_is_read_until_it_was_published_frozen(tmp_path: Path):
    module, source, publisher = frozen_publisher(tmp_path)
    publisher.publish()
    module.cold.requires_grad_(True)
    assert "cold" in source.read_by(publisher.publish)
    module.cold.requires_grad_(False)
    assert "cold" in source.read_by(publisher.publish)
    assert "cold" not in source.read_by(publisher.publish)


def test_tensor_that_is_yielded_as_a_view_into_another_is_published(tmp_path: Path):
    whole = torch.randn(4, 6)
    pairs = {"left": whole[:, :3], "right": whole[:, 3:]}
    write_checkpoint(tmp_path / "base", {name: view.clone() for name, view in pairs.items()})
    publisher = open_publisher(IterableSource(pairs), tmp_path)
    whole.mul_(2)
    publisher.publish()
    assert_same_state(states(tmp_path)[1], {name: bits_of(view) for name, view in pairs.items()})


def test_all_special_bits_of_a_step_are_published(tmp_path: Path, base: Path, trainer: TinyTrainer):
    publisher = open_publisher(trainer, tmp_path)
    for spec in TINY_SPECS:
        trainer.poke(spec.name, np.arange(spec.numel), random_bits(spec.dtype, spec.numel, "all"))
    publisher.publish()
    assert_same_state(states(tmp_path)[1], trainer.state())


def test_sync_publishes_once_and_brings_every_server_there(tmp_path: Path, base: Path, trainer: TinyTrainer):
    with answering(EngineStub()) as good, answering(EngineStub()) as bad:
        bad.always["apply"] = "ApplyError"
        publisher = open_publisher(trainer, tmp_path)
        trainer.step(1)
        report = publisher.sync(DeltaSync([good.url, bad.url]), step=5, metrics={"reward": 0.5})
        assert (report.version, publisher.version) == (1, 1)
        assert [found.ok for found in report.servers] == [True, False]
        assert good.label == f"{publisher.run_id}@1"
    assert_same_state(states(tmp_path)[1], trainer.state())
    run = RunFolder(PosixStore(tmp_path / "run"))
    writer = run.read_metadata(run.read_version(1))
    assert (writer.step, writer.metrics) == (5, {"reward": 0.5})


def test_sync_that_cannot_publish_asks_no_server(tmp_path: Path, base: Path, trainer: TinyTrainer):
    with answering(EngineStub()) as server:
        publisher = open_publisher(trainer, tmp_path)
        trainer.weights["weight"] = torch.zeros(1)
        with pytest.raises(SourceError):
            publisher.sync(DeltaSync([server.url]))
        assert server.asked == []


def test_trainer_waits_until_samplers_have_acknowledged_its_newest_version(
    tmp_path: Path, base: Path, trainer: TinyTrainer
):
    publisher = open_publisher(trainer, tmp_path)
    acknowledger = Acknowledger(PosixStore(tmp_path / "run"), publisher.run_id, "a")
    publisher.publish()
    acknowledger.write(1, pause_s=0.5)
    assert publisher.wait_applied(["a"], timeout_s=0.0)["a"].pause_s == 0.5
    publisher.publish()
    with pytest.raises(StageError, match="version 2 was not acknowledged") as caught:
        publisher.wait_applied(["a"], timeout_s=0.0)
    assert caught.value.found == "a at version 1"
    assert publisher.wait_applied(["a"], version=1, timeout_s=0.0)["a"].version == 1
    acknowledger.write(2, pause_s=0.5)
    assert publisher.wait_applied(["a"], timeout_s=0.0)["a"].version == 2
