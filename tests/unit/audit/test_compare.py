"""Comparing two places: what the chain says is what a comparison of whole states says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints import tiny_tensors, write_checkpoint
from tests.support.runs import MIXED, TinyRun, copy_of, make_mixed_run, make_run
from vllm_delta_snapshot.audit.compare_checkpoints import compare_checkpoints
from vllm_delta_snapshot.audit.compare_versions import compare_versions
from vllm_delta_snapshot.audit.comparison import Comparison
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import BaseMismatch, BrokenChain, SourceError
from vllm_delta_snapshot.runs.materialize import materialize

LAST = len(MIXED)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_mixed_run(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def whole(mixed: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Checkpoint]:
    """Return whole states, made once each by the way that `materialize` goes."""
    made: dict[int, Checkpoint] = {0: Checkpoint(mixed.base)}
    folder = tmp_path_factory.mktemp("whole")

    def of(version: int) -> Checkpoint:
        if version not in made:
            materialize(mixed.folder, made[0], version, folder / str(version))
            made[version] = Checkpoint(folder / str(version))
        return made[version]

    return of


def compared(run: TinyRun, a: int, b: int, base: Checkpoint | None = None) -> Comparison:
    return compare_versions(run.folder, a, b, find_base=lambda: base)


@pytest.mark.parametrize(("a", "b"), [(0, LAST), (2, 5), (5, 2), (3, 4), (6, 8), (4, 4), (0, 0)])
def test_versions_differ_as_whole_checkpoints_do(mixed: TinyRun, whole: Callable[[int], Checkpoint], a: int, b: int):
    found = compared(mixed, a, b, Checkpoint(mixed.base))
    expected = compare_checkpoints(whole(a), whole(b))
    assert found.is_exact
    assert [replace(t, num_nan=None) for t in found.tensors] == [replace(t, num_nan=None) for t in expected.tensors]
    for tensor, other in zip(found.tensors, expected.tensors, strict=True):
        assert tensor.num_nan in (None, other.num_nan)
    assert (found.num_tensors, found.total_elements) == (expected.num_tensors, expected.total_elements)
    assert found.is_same == (a == b)


def test_without_the_base_counts_of_absolute_values_are_upper_bounds(
    mixed: TinyRun, whole: Callable[[int], Checkpoint]
):
    found = compared(mixed, 2, 3)  # version 3 is raw
    assert not found.is_exact
    exact = {tensor.name: tensor.changed for tensor in compare_checkpoints(whole(2), whole(3)).tensors}
    assert {tensor.name for tensor in found.tensors} >= set(exact)
    for tensor in found.tensors:
        assert tensor.is_exact is False
        assert (tensor.changed or 0) >= (exact.get(tensor.name) or 0)
        assert (tensor.max_ulp, tensor.num_nan) == (None, None)


def test_chain_of_small_differences_needs_no_base(tmp_path: Path):
    run = make_run(tmp_path, 0, encoding="difference")
    name = "model.embed.weight"
    for step in (1, 1, 0xFFFF):  # up, up, and down again
        run.trainer.poke(name, np.array([3, 9]), run.trainer.state()[name][[3, 9]] + np.array([step, 1], np.uint16))
        run.publisher.publish()

    def no_base() -> Checkpoint | None:
        raise AssertionError("it was asked for the base")

    found = compare_versions(run.folder, 0, 3, find_base=no_base)
    assert [(t.name, t.changed, t.max_ulp, t.is_exact) for t in found.tensors] == [(name, 2, 3, True)]
    back = compare_versions(run.folder, 1, 3, find_base=no_base)  # position 3 is where it was
    assert [(t.changed, t.max_ulp) for t in back.tensors] == [(1, 2)]


def test_progress_tells_of_every_version_that_is_read(mixed: TinyRun):
    told: list[tuple[int, int]] = []
    base = Checkpoint(mixed.base)
    compare_versions(
        mixed.folder, 2, 4, find_base=lambda: base, progress=lambda done, total: told.append((done, total))
    )
    assert told == [(1, 2), (2, 2), (3, 4), (4, 4)]


def test_base_that_is_another_one_is_found_out(mixed: TinyRun, tmp_path: Path):
    other = Checkpoint(write_checkpoint(tmp_path / "other", tiny_tensors("other")))
    with pytest.raises(BaseMismatch, match="the values before are not the ones"):
        compared(mixed, 2, 3, other)
    tensors = tiny_tensors()
    tensors.pop("model.norm.weight")
    with pytest.raises(SourceError, match=r"model\.norm\.weight is not in the checkpoint"):
        compared(mixed, 2, 3, Checkpoint(write_checkpoint(tmp_path / "less", tensors)))


def test_gap_between_versions_is_an_error(mixed: TinyRun, tmp_path: Path):
    run = copy_of(mixed, tmp_path / "run")
    (run.sync_dir / "versions" / "00000003.json").unlink()
    with pytest.raises(BrokenChain, match="missing: 3"):
        compared(run, 2, 4)
    assert compared(run, 4, 6, None).tensors  # behind the gap the chain holds


# --- checkpoints


def test_checkpoints_differ_by_names_shapes_types_and_bits(tmp_path: Path):
    ours = {
        "both": torch.tensor([1.0, -0.0, float("nan"), 2.0]),
        "void": torch.empty(0, 3),
        "shape": torch.zeros(2, 3),
        "dtype": torch.zeros(4, dtype=torch.bfloat16),
        "gone": torch.zeros(1),
        "integers": torch.tensor([1, 2, 3]),
    }
    theirs = dict(ours) | {
        "both": torch.tensor([1.0, 0.0, 3.0, float(np.nextafter(np.float32(2), np.float32(3)))]),
        "shape": torch.zeros(3, 2),
        "dtype": torch.zeros(4, dtype=torch.float16),
        "new": torch.zeros(1),
        "integers": torch.tensor([1, 2, 4]),
    }
    del theirs["gone"]
    told: list[tuple[int, int]] = []
    found = compare_checkpoints(
        Checkpoint(write_checkpoint(tmp_path / "a", ours)),
        Checkpoint(write_checkpoint(tmp_path / "b", theirs, shards=2)),
        progress=lambda done, total: told.append((done, total)),
    )
    assert told[-1] == (7, 7)
    by_name = {tensor.name: tensor for tensor in found.tensors}
    assert list(by_name) == ["both", "dtype", "gone", "integers", "new", "shape"]
    both = by_name["both"]
    assert (both.changed, both.max_ulp, both.num_nan, both.density) == (3, 1, 1, 0.75)
    assert (by_name["integers"].changed, by_name["integers"].max_ulp) == (1, None)
    assert (by_name["gone"].b, by_name["new"].a) == (None, None)
    assert (str(by_name["dtype"].a), str(by_name["dtype"].b)) == ("BF16[4]", "F16[4]")
    assert (by_name["shape"].changed, by_name["shape"].density) == (None, None)
    assert (found.num_tensors, found.total_elements, found.changed_elements) == (7, 7, 4)


def test_large_tensors_are_compared_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vllm_delta_snapshot.audit.compare_checkpoints._WINDOW", 10)
    one = torch.zeros(95)
    other = one.clone()
    other[[0, 9, 10, 94]] = torch.tensor([1e-45, 0.0, 3e-45, float("nan")])
    a = Checkpoint(write_checkpoint(tmp_path / "a", {"t": one}))
    b = Checkpoint(write_checkpoint(tmp_path / "b", {"t": other}))
    (tensor,) = compare_checkpoints(a, b).tensors
    assert (tensor.changed, tensor.max_ulp, tensor.num_nan) == (3, 2, 1)
    assert compare_checkpoints(a, a).is_same
