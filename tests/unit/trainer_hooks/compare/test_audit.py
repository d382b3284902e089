"""Audits: what is published is proven against the weights, in turns or whole, and a difference is a named error.

With several processes: tests/support/shard_ranks.py, which audits every case.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.borrowed import one_buffer
from tests.support.checkpoints import TINY_SPECS, tiny_tensors, write_checkpoint
from tests.support.lanes import LateLanes
from tests.support.runs import TinyTrainer, assert_same_state, replay
from tests.support.tensors import bits_of
from trainer_hooks import DeltaPublisher, ShardedPublisher
from trainer_hooks.compare.audit import Turns
from trainer_hooks.compare.device_diff import DeviceDiff
from trainer_hooks.compare.diff import Found, Piece, pieces
from vllm_delta_snapshot.errors import NotPublished, SourceError, VerifyError, VersionConflict

Publisher = DeltaPublisher | ShardedPublisher
BOTH = pytest.mark.parametrize("make", [DeltaPublisher, ShardedPublisher], ids=["one process", "several"])
TOTAL = sum(spec.numel for spec in TINY_SPECS)
PIECE = 16


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("diff", "differ", "shard_differ"):
        monkeypatch.setattr(f"trainer_hooks.compare.{module}.PIECE_ELEMENTS", PIECE)
    monkeypatch.setattr("trainer_hooks.compare.diff._OF_THREAD", threading.local())


@pytest.fixture
def trainer(tmp_path: Path) -> TinyTrainer:
    write_checkpoint(tmp_path / "base", tiny_tensors())
    return TinyTrainer()


def opened(make: type[Publisher], source: object, folder: Path, **options: Any) -> Publisher:
    return make(source, sync_dir=str(folder / "run"), base=folder / "base", threads=2, **options)


@BOTH
def test_audit_proves_each_version_and_publishes_nothing(make: type[Publisher], trainer: TinyTrainer, tmp_path: Path):
    with opened(make, trainer, tmp_path) as publisher:
        for number in range(4):
            report = publisher.audit()
            assert (report.version, report.state_digest, report.elements) == (number, publisher.state_digest, TOTAL)
            trainer.step(number)
            publisher.publish()  # which the audit waits for
        assert publisher.audit().version == publisher.version == 4


@BOTH
def test_weights_that_are_not_the_version_are_named(make: type[Publisher], trainer: TinyTrainer, tmp_path: Path):
    with opened(make, trainer, tmp_path) as publisher:
        publisher.publish()
        name = TINY_SPECS[0].name
        trainer.poke(name, np.array([103]), trainer.state()[name][[103]] ^ np.uint16(1))
        with pytest.raises(VerifyError, match="the weights are not version 1") as caught:
            publisher.audit()
        assert (caught.value.tensor, caught.value.found) == (name, "1 tensors that differ")
        assert "before the weights change" in str(caught.value.hint)
        publisher.publish()
        assert publisher.audit().version == 2


@BOTH
def test_audit_of_weights_that_do_not_fit_is_refused(make: type[Publisher], trainer: TinyTrainer, tmp_path: Path):
    publisher = opened(make, trainer, tmp_path)
    trainer.weights.pop("model.norm.weight")
    with pytest.raises(SourceError, match="missing"):
        publisher.audit()
    publisher.close()
    with pytest.raises(NotPublished, match="closed"):
        publisher.audit()


@BOTH
def test_audit_reads_what_is_lent_before_it_is_asked_for_more(
    make: type[Publisher], trainer: TinyTrainer, tmp_path: Path
):
    with opened(make, lambda: one_buffer(trainer.weights), tmp_path) as publisher:
        trainer.step(1)
        publisher.publish()
        assert publisher.audit().elements == TOTAL


@BOTH
@pytest.mark.parametrize("way", ["device", "host"])
def test_audit_reads_a_device_after_what_was_queued(
    make: type[Publisher], way: Any, trainer: TinyTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lanes = LateLanes()
    for module in ("publisher", "sharded_publisher"):
        monkeypatch.setattr(f"trainer_hooks.{module}.DeviceDiff", lambda on: DeviceDiff(on, lanes_of=lambda _: lanes))
    with opened(make, trainer, tmp_path, diff_on=way, audit_every=1) as publisher:
        for number in (1, 2):
            lanes.stream.queue(lambda number=number: trainer.step(number))
            publisher.publish()
        assert publisher.audit().version == 2
        lanes.stream.queue(lambda: trainer.step(3))
        with pytest.raises(VerifyError, match="the weights are not version 2"):
            publisher.audit()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cold = nn.Parameter(torch.randn(40), requires_grad=False)
        self.warm = nn.Parameter(torch.randn(100))


def frozen(make: type[Publisher], folder: Path, **options: Any) -> tuple[Frozen, Publisher]:
    module = Frozen()
    write_checkpoint(folder / "base", {name: p.detach().clone() for name, p in module.named_parameters()})
    return module, opened(make, module, folder, skip_frozen=True, asynchronous=False, **options)


def check_cold(module: Frozen, folder: Path) -> None:
    assert replay(folder / "run", folder / "base", folder)[-1]["cold"].tolist() == bits_of(module.cold).tolist()


@BOTH
def test_audit_finds_what_skipping_missed_and_the_next_publication_carries_it(make: type[Publisher], tmp_path: Path):
    module, publisher = frozen(make, tmp_path)
    publisher.publish()
    module.cold.data[39] += 1
    assert publisher.publish().report.changed_elements == 0  # what one has asked for
    with pytest.raises(VerifyError, match="the weights are not version 2") as caught:
        publisher.audit()
    assert caught.value.tensor == "cold"
    assert publisher.publish().report.changed_elements == 1
    assert publisher.audit().version == 3
    check_cold(module, tmp_path)


@BOTH
def test_audit_in_turns_finds_what_skipping_missed_within_that_many_versions(make: type[Publisher], tmp_path: Path):
    every = 4
    module, publisher = frozen(make, tmp_path, audit_every=every)
    for _ in range(2):
        publisher.publish()
    module.cold.data[39] += 1
    with pytest.raises(VerifyError, match="was written although nothing counted it") as caught:
        [publisher.publish() for _ in range(every)]
    assert caught.value.tensor == "cold"
    assert publisher.version < 2 + every
    assert publisher.publish().report.changed_elements == 1
    for _ in range(2 * every):
        assert publisher.publish().report.changed_elements == 0
    check_cold(module, tmp_path)


def loses_one(find: Callable[[Piece], list[Found]]) -> Callable[[Piece], list[Found]]:
    """Return a comparison that overlooks the last element that differs, as a broken kernel would."""

    def broken(piece: Piece) -> list[Found]:
        return [(where[:-1], old[:-1], new[:-1]) for where, old, new in find(piece)]

    return broken


@BOTH
@pytest.mark.parametrize("asynchronous", [True, False])
def test_audit_in_turns_refuses_what_a_comparison_overlooked(
    make: type[Publisher], asynchronous: bool, trainer: TinyTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from trainer_hooks.compare import device_diff

    publisher = opened(make, trainer, tmp_path, audit_every=1, asynchronous=asynchronous)
    trainer.step(1)
    with monkeypatch.context() as patched:
        patched.setattr(device_diff, "find_in_chunks", loses_one(device_diff.find_in_chunks))
        with pytest.raises(VerifyError, match="what was found to differ is not how the weights differ") as caught:
            publisher.publish().wait()
    assert caught.value.tensor in trainer.weights
    assert publisher.version == 0
    publisher.publish().wait()
    publisher.close()
    assert_same_state(replay(tmp_path / "run", tmp_path / "base", tmp_path)[-1], trainer.state())


@BOTH
def test_baseline_that_is_not_the_version_is_found(make: type[Publisher], trainer: TinyTrainer, tmp_path: Path):
    publisher = opened(make, trainer, tmp_path)
    publisher.publish().wait()
    name = "model.norm.weight"
    baseline = publisher._published.baseline
    held = baseline.bits(name) if isinstance(publisher, DeltaPublisher) else baseline._by_name[name][0].bits
    held[3] ^= 1  # memory that fails
    trainer.poke(name, np.array([3]), held[[3]])
    with pytest.raises(VerifyError, match="what this process keeps of version 1 is not that version") as caught:
        publisher.audit()
    assert caught.value.expected == f"state digest {publisher.state_digest}"
    assert "Start a new publisher" in str(caught.value.hint)


@BOTH
def test_store_with_another_version_is_found(make: type[Publisher], trainer: TinyTrainer, tmp_path: Path):
    publisher = opened(make, trainer, tmp_path)
    publisher.publish().wait()
    record = tmp_path / "run" / "versions" / "00000001.json"
    record.write_text(record.read_text().replace(publisher.state_digest, "00000000deadbeef"))
    with pytest.raises(VersionConflict, match="version 1 is not the one that this trainer published"):
        publisher.audit()


@pytest.mark.parametrize("every", [1, 2, 3, 7, 1000])
def test_every_piece_has_one_turn_in_so_many_versions(every: int):
    weights = tiny_tensors()
    cut = [p for spec in TINY_SPECS for p in pieces(spec, bits_of(weights[spec.name]), weights[spec.name])]
    counts: Counter[tuple[str, int]] = Counter()
    for version in range(5, 5 + every):
        turns = Turns.of(every, version, TINY_SPECS)
        due = [piece for piece in cut if turns.is_due(piece)]
        counts.update((piece.spec.name, piece.start) for piece in due)
        assert sum(piece.baseline.size for piece in due) <= TOTAL / every + 2 * PIECE
        assert all(turns.is_any_due([piece.spec]) for piece in due)
    assert set(counts.values()) == {1}
    assert len(counts) == len(cut)


@BOTH
def test_audits_in_no_versions_are_refused(make: type[Publisher], trainer: TinyTrainer, tmp_path: Path):
    with pytest.raises(ValueError, match="audit_every must be at least 1"):
        opened(make, trainer, tmp_path, audit_every=0)
    assert Turns.of(None, 1, TINY_SPECS) is None
