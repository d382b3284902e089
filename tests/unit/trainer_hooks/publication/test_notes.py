"""Odd metrics and steps keep no weights from engines: they are recorded as numbers, or left out with a warning."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.runs import TinyTrainer
from trainer_hooks import DeltaPublisher
from trainer_hooks.publication import notes
from trainer_hooks.publication.notes import LONGEST_NAME, MOST_METRICS, notes_of
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

RECORDED = {
    "int": (3, 3.0),
    "bool": (True, 1.0),
    "huge": (1.7e308, 1.7e308),
    "subnormal": (5e-324, 5e-324),
    "big int": (10**300, 1e300),
    "numpy scalar": (np.float32(0.5), 0.5),
    "numpy 0-d": (np.array(2), 2.0),
    "numpy of one": (np.array([[2.5]]), 2.5),
    "bf16 tensor": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    "tensor with a gradient": (torch.tensor([1.5], requires_grad=True), 1.5),
}

LEFT_OUT: dict[str, Any] = {
    "nan": float("nan"),
    "infinite": float("-inf"),
    "int beyond floats": 10**400,
    "int of too many digits": 10**5000,
    "nan tensor": torch.tensor(float("nan")),
    "fp64 scalar that is infinite": np.float64("inf"),
    "none": None,
    "text": "0.5",
    "bytes": b"1",
    "nested": {"a": 1.0},
    "list": [1.0],
    "tensor of two": torch.zeros(2),
    "empty array": np.zeros(0),
    "complex": 1j,
    "meta tensor": torch.zeros((), device="meta"),
}


class Lazy(dict[str, float]):
    """A mapping that cannot be gone through."""

    def items(self) -> Any:
        raise RuntimeError("the backend is gone")


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_warned", set())


@pytest.mark.parametrize("kind", RECORDED)
def test_number_of_any_kind_is_recorded(kind: str) -> None:
    given, recorded = RECORDED[kind]
    assert notes_of("base", 1, {"reward": given}).metrics == {"reward": recorded}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_what_is_no_number_is_left_out_and_said_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert notes_of("base", 1, {"loss": 1.0, "reward": LEFT_OUT[kind]}).metrics == {"loss": 1.0}
    assert [record.getMessage().startswith("metric reward is not recorded") for record in caplog.records] == [True]


@pytest.mark.parametrize("metrics", [Lazy(a=1.0), [("a", 1.0)], "a", 3, iter({"a": 1.0})])
def test_what_is_no_mapping_is_left_out(metrics: object, caplog: pytest.LogCaptureFixture) -> None:
    assert notes_of("base", 1, metrics).metrics == {}
    assert "metrics is not recorded" in caplog.text


def test_names_are_made_text_or_left_out() -> None:
    class Nameless:
        def __str__(self) -> str:
            raise RuntimeError("no name")

    odd = {1: 1.0, ("a", 2): 2.0, "\ud800": 3.0, Nameless(): 4.0, "x" * (LONGEST_NAME + 1): 5.0, "": 6.0}
    assert notes_of("base", 1, odd).metrics == {"1": 1.0, "('a', 2)": 2.0, "": 6.0}


def test_more_metrics_than_fit_are_cut() -> None:
    found = notes_of("base", 1, {f"m{number}": 1.0 for number in range(MOST_METRICS + 5)}).metrics
    assert len(found) == MOST_METRICS


@pytest.mark.parametrize(
    ("given", "recorded"),
    [(None, None), (3, 3), (np.int64(3), 3), (torch.tensor(3), 3), (3.0, 3), (-1, -1)]
    + [(odd, None) for odd in (3.5, "3", float("nan"), 2**63, torch.zeros(2), object())],
)
def test_step_is_an_integer_or_left_out(given: object, recorded: int | None) -> None:
    assert notes_of("base", given, None).step == recorded


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[DeltaPublisher]:
    from tests.support.checkpoints import write_checkpoint

    trainer = TinyTrainer()
    write_checkpoint(tmp_path / "base", trainer.weights)
    with DeltaPublisher(trainer, sync_dir=str(tmp_path / "run"), base=tmp_path / "base") as publisher:
        yield publisher


def test_every_odd_metric_at_once_keeps_no_version_back(publisher: DeltaPublisher, tmp_path: Path) -> None:
    given = {kind: value for kind, (value, _) in RECORDED.items()} | LEFT_OUT
    version = publisher.publish(step=3.5, metrics=given).wait().version  # type: ignore[arg-type]
    folder = RunFolder(open_store(str(tmp_path / "run")))
    written = folder.read_metadata(folder.read_version(version))
    assert written.metrics == {kind: number for kind, (_, number) in RECORDED.items()}
    assert written.step is None
