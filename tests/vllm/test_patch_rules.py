"""What vLLM's own patch loader refuses is refused here before anything is written; what it takes comes out the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import Engine, engine
from tests.support.openrl import write_openrl_delta
from tests.support.tiny_models import make_model
from vllm_delta_snapshot.errors import CorruptFile

NAME = "model.layers.0.self_attn.k_proj.weight"
SHAPE = [64, 128]
NUMEL = 64 * 128

Patch = tuple[list[int], torch.Tensor]


def _values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.bfloat16)


REFUSED_BY_BOTH: dict[str, Patch] = {
    "duplicates": ([5, 5, 9], _values(1, 2, 3)),
    "out of range": ([5, NUMEL], _values(1, 2)),
    "negative": ([-1, 5], _values(1, 2)),
    "too few values": ([5, 7, 9], _values(1, 2)),
    "too many values": ([5], _values(1, 2)),
    "integers": ([5, 7], torch.tensor([1, 2], dtype=torch.int16)),
}
REFUSED_BY_OURS: dict[str, Patch] = {
    # The format asks for increasing positions; vLLM's loader takes any order, and would convert other types.
    "unsorted": ([9, 5], _values(1, 2)),
    "another type": ([5, 7], torch.tensor([1, 2], dtype=torch.float16)),
}


def test_rules_of_vllms_patch_loader_hold_here(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path / "base")
    with engine(tmp_path / "base") as live:
        live.init()
        before = live.checksums()
        for number, (case, patch) in enumerate((REFUSED_BY_BOTH | REFUSED_BY_OURS).items()):
            folder = write_openrl_delta(tmp_path / f"bad-{number}", {NAME: (*patch, SHAPE)})
            with pytest.raises(CorruptFile, match=r"k_proj"):
                _apply(live, folder)
            assert live.checksums() == before, case
        for patch in REFUSED_BY_BOTH.values():
            with pytest.raises((ValueError, TypeError, IndexError)):
                _by_vllm(live, patch)
        assert live.checksums() == before

        _apply(live, write_openrl_delta(tmp_path / "empty", {NAME: ([], _values(), SHAPE)}))
        assert live.checksums() == before
        _the_later_of_two_wins(live, tmp_path)
        _comes_out_as_by_vllm(live, tmp_path)


def _the_later_of_two_wins(live: Engine, tmp_path: Path) -> None:
    first = write_openrl_delta(tmp_path / "first", {NAME: ([3, 5], _values(1, 2), SHAPE)})
    second = write_openrl_delta(tmp_path / "second", {NAME: ([5, 6], _values(7, 8), SHAPE)})
    for folder in (first, second):
        _apply(live, folder)
    key = live.model.get_parameter("model.layers.0.self_attn.qkv_proj.weight")[128:192].reshape(-1)
    assert key[[3, 5, 6]].tolist() == [1, 7, 8]


def _comes_out_as_by_vllm(live: Engine, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    index = torch.randperm(NUMEL, generator=generator)[:500].sort().values.tolist()
    values = torch.randn(500, generator=generator).to(torch.bfloat16)
    before = live.checksums()
    _apply(live, write_openrl_delta(tmp_path / "random", {NAME: (index, values, SHAPE)}))
    ours = live.checksums()
    assert ours != before
    _by_vllm(live, (index, values * 3))
    assert live.checksums() != ours
    _by_vllm(live, (index, values))
    assert live.checksums() == ours


def _apply(live: Engine, folder: Path) -> None:
    live.llm.start_weight_update()
    live.llm.update_weights({"update_info": {"target_weights_path": str(folder)}})
    live.llm.finish_weight_update()


def _by_vllm(live: Engine, patch: Patch) -> None:
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    index, values = patch
    dtype: Any = values.dtype
    load: Callable[..., Any] = load_checkpoint_weight_patches
    load(live.model, [CheckpointWeightPatch(NAME, tuple(SHAPE), dtype, values, torch.tensor(index))])
