"""The full check finds any weight that is not the version's, on plain and reloaded layers; and going back is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import Engine, engine
from tests.support.tiny_models import make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.drive import repair_llm, sync_llm, verify_llm
from vllm_delta_snapshot.errors import OutOfOrder, VerifyError


@pytest.mark.parametrize(
    ("architecture", "options"), [("llama_tied", {}), ("qwen3", {"quantization": "fp8_per_channel"})]
)
def test_full_check_finds_one_flipped_bit_and_rollback_is_exact(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    model = make_model(architecture, base)
    publisher = DeltaPublisher(model, sync_dir=str(run), base=base, asynchronous=False)
    with engine(base, **options) as live:
        live.init(sync_dir=str(run))
        history = [live.checksums()]
        verify_llm(live.llm)
        for number in (1, 2, 3):
            train_step(model, number)
            sync_llm(live.llm, publisher.publish().version, stage_timeout_s=60, run_id=publisher.run_id)
            history.append(live.checksums())
        verify_llm(live.llm)
        with pytest.raises(VerifyError, match="live weights are not those of version 2"):
            verify_llm(live.llm, 2, run_id=publisher.run_id)
        _finds_flipped_bits(live)
        with pytest.raises(OutOfOrder, match="allow_rollback"):
            sync_llm(live.llm, 2, run_id=publisher.run_id)
        for version in (2, 0, 3, 1):
            sync_llm(live.llm, version, stage_timeout_s=60, allow_rollback=True, run_id=publisher.run_id)
            assert live.checksums() == history[version]
            verify_llm(live.llm)
        assert len({tuple(sums.values()) for sums in history}) == len(history)


def _finds_flipped_bits(live: Engine) -> None:
    for name, parameter in list(live.model.named_parameters())[:: max(1, len(list(live.model.parameters())) // 5)]:
        bits = parameter.data.view(torch.uint8) if parameter.element_size() == 1 else parameter.data.view(torch.int16)
        flat = bits.as_strided((bits.numel(),), (1,))
        flat[-1] ^= 1
        with pytest.raises(VerifyError, match=r"live weights are not those of version 3: \d+ of"):
            verify_llm(live.llm)
        flat[-1] ^= 1
        assert name
    verify_llm(live.llm)


def test_weights_in_another_type_are_converted_as_the_loader_does(tmp_path: Path) -> None:
    from tests.support.engines import PROMPTS
    from vllm_delta_snapshot.checkpoint import Checkpoint
    from vllm_delta_snapshot.runs.materialize import materialize
    from vllm_delta_snapshot.runs.run_folder import RunFolder
    from vllm_delta_snapshot.store import open_store

    assert PROMPTS
    base, run = tmp_path / "base", tmp_path / "run"
    model = make_model("qwen3", base)
    publisher = DeltaPublisher(model, sync_dir=str(run), base=base, asynchronous=False)
    train_step(model, 1)
    publisher.publish()
    materialize(RunFolder(open_store(str(run))), Checkpoint(base), 1, tmp_path / "one")
    for dtype in ("float32", "float16"):
        with engine(base, dtype=dtype) as live:
            live.init(sync_dir=str(run))
            sync_llm(live.llm, 1, stage_timeout_s=60, run_id=publisher.run_id)
            verify_llm(live.llm)
            checksums, tokens = live.checksums(), live.tokens()
            _finds_one_changed_value(live)
        with engine(tmp_path / "one", dtype=dtype) as fresh:
            assert fresh.checksums() == checksums
            assert fresh.tokens() == tokens


def _finds_one_changed_value(live: Engine) -> None:
    weight = live.model.get_parameter("model.norm.weight").data
    before = weight[7].item()
    weight[7] = 3.25
    with pytest.raises(VerifyError, match=r"live weights are not those of version 1: 1 of"):
        verify_llm(live.llm)
    weight[7] = before
    verify_llm(live.llm)


def test_what_cannot_be_compared_is_no_success_and_a_repair_makes_it_comparable(tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    model = make_model("qwen3", base)
    publisher = DeltaPublisher(model, sync_dir=str(run), base=base, encoding="raw", asynchronous=False)
    train_step(model, 1)
    publisher.publish()
    with engine(base, dtype="float16") as live:
        live.init(sync_dir=str(run))
        sync_llm(live.llm, 1, stage_timeout_s=60, run_id=publisher.run_id)
        with pytest.raises(VerifyError, match=r"cannot be compared with version 1.*repair --server"):
            verify_llm(live.llm)
        repair_llm(live.llm)
        verify_llm(live.llm)
        _finds_one_changed_value(live)
