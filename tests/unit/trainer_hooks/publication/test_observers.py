"""Observers of a publisher: Prometheus metrics, experiment trackers, and one that fails."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support.faults import FaultyStore
from tests.support.runs import TinyRun, make_run
from trainer_hooks import DeltaPublisher, PublishMetrics, PublishReport, TensorBoardObserver, WandbObserver
from vllm_delta_snapshot.errors import CompatibilityError, DeltaSnapshotError, SourceError, StoreUnavailable


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def published(self, report: PublishReport, step: int | None, metrics: Mapping[str, float]) -> None:
        self.told.append((report.version, step, dict(metrics)))

    def failed(self, error: DeltaSnapshotError) -> None:
        self.told.append(type(error))


class Broken:
    """An observer that fails."""

    def published(self, report: PublishReport, step: int | None, metrics: Mapping[str, float]) -> None:
        raise RuntimeError("the tracker is down")

    def failed(self, error: DeltaSnapshotError) -> None:
        raise RuntimeError("the tracker is down")


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return make_run(tmp_path, 0)


def observed(run: TinyRun, *observers: object, asynchronous: bool = True) -> DeltaPublisher:
    return DeltaPublisher(
        run.trainer, sync_dir=str(run.sync_dir), base=run.base, observers=observers, asynchronous=asynchronous
    )


@contextlib.contextmanager
def misfit(run: TinyRun) -> Iterator[None]:
    """Let the trainer have a tensor of another shape meanwhile."""
    weights = run.trainer.weights
    kept = weights["model.norm.weight"]
    weights["model.norm.weight"] = kept[:3]
    yield
    weights["model.norm.weight"] = kept


def samples(metrics: PublishMetrics) -> dict[str, float]:
    kind, body = metrics.exposition()
    assert kind.startswith("text/plain")
    lines = (line for line in body.decode().splitlines() if not line.startswith("#"))
    return {
        name.removeprefix("delta_snapshot_"): float(value) for name, value in (line.rsplit(" ", 1) for line in lines)
    }


@pytest.mark.parametrize("asynchronous", [True, False])
def test_observers_are_told_of_what_happens_and_one_that_fails_stops_nobody(
    run: TinyRun, caplog: pytest.LogCaptureFixture, asynchronous: bool
):
    recorder = Recorder()
    publisher = observed(run, Broken(), recorder, asynchronous=asynchronous)
    run.trainer.step(1)
    with caplog.at_level(logging.WARNING, "trainer_hooks.publication.observers"):
        assert publisher.publish(step=10, metrics={"reward": 0.5}).wait().version == 1
        with misfit(run), pytest.raises(SourceError, match=r"model\.norm\.weight"):
            publisher.publish().wait()
        assert publisher.publish().wait().version == 2
    assert recorder.told == [(1, 10, {"reward": 0.5}), SourceError, (2, None, {})]
    assert [record.getMessage() for record in caplog.records] == ["observer=Broken failed"] * 3


def test_failure_behind_the_step_is_told_once(run: TinyRun, monkeypatch: pytest.MonkeyPatch):
    recorder = Recorder()
    publisher = observed(run, recorder)
    faulty = FaultyStore(publisher._own.store, 0)
    monkeypatch.setattr(publisher._own, "store", faulty)
    run.trainer.step(1)
    with pytest.raises(StoreUnavailable):
        publisher.publish().wait()
    run.trainer.step(2)
    assert publisher.publish(step=2).wait().version == 1
    assert recorder.told == [StoreUnavailable, (1, 2, {})]


def test_metrics_have_the_documented_names_and_tell_what_was_published(run: TinyRun):
    metrics = PublishMetrics()
    publisher = observed(run, metrics)
    reports = []
    for number in (1, 2):
        run.trainer.step(number)
        reports.append(publisher.publish().report)
    with misfit(run), pytest.raises(SourceError):
        publisher.publish()
    found = samples(metrics)
    expected = {
        'published_bytes_total{kind="delta"}': sum(report.payload_bytes for report in reports),
        'publish_duration_seconds_count{stage="diff"}': 2,
        'publish_duration_seconds_sum{stage="diff"}': sum(report.diff_s for report in reports),
        'publish_duration_seconds_count{stage="write"}': 2,
        "publish_blocked_duration_seconds_sum": sum(report.blocked_s for report in reports),
        "mutation_density_ratio_sum": sum(report.density for report in reports),
        "mutation_density_ratio_count": 2,
        "head_version": 2,
        "checkpoint_bytes": reports[0].checkpoint_bytes,
        'errors_total{error="SourceError",stage="diff"}': 1,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    docs = (Path(__file__).parents[4] / "docs" / "observability.md").read_text()
    for name in expected:
        documented = name.partition("{")[0].removesuffix("_count").removesuffix("_sum")
        assert f"`delta_snapshot_{documented}" in docs


def test_metrics_are_served_on_loopback_for_as_long_as_wanted(run: TinyRun):
    metrics = PublishMetrics()
    with metrics.serve(0) as port, urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        body = answer.read().decode()
    assert "delta_snapshot_build_info{version=" in body
    assert all(line.startswith(("#", "delta_snapshot_")) for line in body.splitlines())
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{port}/metrics")


def test_metrics_can_be_beside_those_of_the_trainer():
    from prometheus_client import CollectorRegistry, Counter, generate_latest

    registry = CollectorRegistry()
    Counter("steps", "of the trainer", registry=registry)
    PublishMetrics(registry)
    assert {b"steps_total 0.0", b"delta_snapshot_head_version 0.0"} <= set(generate_latest(registry).splitlines())


@pytest.mark.parametrize(
    ("library", "make", "hint"),
    [
        ("prometheus_client", PublishMetrics, r"pip install 'vllm-delta-snapshot\[metrics\]'"),
        ("wandb", WandbObserver, "pip install wandb"),
        ("torch.utils.tensorboard", lambda: TensorBoardObserver("logs"), "pip install tensorboard"),
    ],
)
def test_missing_library_is_named_with_what_to_install(library: str, make, hint: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(CompatibilityError, match=hint):
        make()


class Written:
    """Takes what trackers are given, by the few methods that are used of them."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []
        self.logged: list[dict[str, float]] = []
        self.defined: list[tuple[str, str]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.rows.append((tag, scalar_value, global_step))

    def define_metric(self, name: str, step_metric: str) -> None:
        self.defined.append((name, step_metric))

    def log(self, data: dict[str, float]) -> None:
        self.logged.append(data)


def test_trackers_get_numbers_over_step_and_version(run: TinyRun):
    written = Written()
    publisher = observed(run, TensorBoardObserver(written), WandbObserver(written))
    run.trainer.step(1)
    first = publisher.publish(step=30).report
    publisher.publish().wait()
    assert ("delta_snapshot/density", first.density, 30) in written.rows
    assert ("delta_snapshot/density", 0.0, 2) in written.rows
    assert written.defined == [("delta_snapshot/*", "delta_snapshot/version")]
    assert (written.logged[0]["delta_snapshot/version"], written.logged[0]["delta_snapshot/step"]) == (1, 30)
    assert written.logged[0]["delta_snapshot/payload_bytes"] == first.payload_bytes
    assert "delta_snapshot/step" not in written.logged[1]


def test_tensorboard_reads_back_what_was_published(run: TinyRun, tmp_path: Path):
    pytest.importorskip("tensorboard", reason="not in requirements; see docs/observability.md")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    observer = TensorBoardObserver(str(tmp_path / "logs"))
    publisher = observed(run, observer)
    run.trainer.step(1)
    report = publisher.publish(step=30).report
    observer._writer.flush()
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    (scalar,) = events.Scalars("delta_snapshot/density")
    assert (scalar.step, scalar.value) == (30, pytest.approx(report.density))


def test_wandb_takes_what_was_published(run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = pytest.importorskip("wandb", reason="not in requirements; see docs/observability.md")
    with pytest.raises(CompatibilityError, match="no Weights & Biases run has begun"):
        WandbObserver()
    tracked = wandb.init(mode="offline", dir=str(tmp_path), project="test")
    publisher = observed(run, WandbObserver())
    run.trainer.step(1)
    report = publisher.publish(step=30).report
    assert tracked.summary["delta_snapshot/density"] == pytest.approx(report.density)
    assert tracked.summary["delta_snapshot/version"] == 1
    tracked.finish()
