"""Bad input on a served engine: refused with a clear error, no weight touched, and it keeps serving.

One engine for all: every case gives it a run of its own, whose version 1 is wrong in one way.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import damage as damages
from tests.support.engines import Engine, engine
from tests.support.tiny_models import make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.drive import sync_llm
from vllm_delta_snapshot.errors import (
    ApplyError,
    BaseMismatch,
    BrokenChain,
    CorruptFile,
    DeltaSnapshotError,
    NotStaged,
    ObjectNotFound,
    RunMismatch,
    SourceError,
    UnsupportedFormat,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refusals") / "base"
    make_model("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def served(base: Path) -> Iterator[Engine]:
    with engine(base) as live:
        yield live


@pytest.fixture(scope="module")
def good_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good versions, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("good") / "run"
    model = make_model("qwen3", tmp_path_factory.mktemp("same") / "base")
    publisher = DeltaPublisher(model, sync_dir=str(folder), base=base, asynchronous=False)
    for number in (1, 2):
        train_step(model, number)
        publisher.publish()
    return folder


DAMAGES: list[tuple[Callable[[Path], None], type[DeltaSnapshotError], str]] = [
    (damages.flip_payload, CorruptFile, "delta.safetensors.* wrong checksum|wrong checksum.*delta.safetensors"),
    (damages.truncate_payload, CorruptFile, "wrong size.*delta.safetensors.*expected .* bytes.*found .* bytes"),
    (damages.remove_payload, CorruptFile, "a file is missing.*delta.safetensors"),
    (damages.flip_metadata, CorruptFile, "metadata was changed.*metadata.json"),
    (damages.foreign_record, RunMismatch, "belongs to another run.*00000001.json"),
    (damages.unknown_format, UnsupportedFormat, "unknown format_version.*00000001.json.*found 99"),
    (damages.out_of_order, CorruptFile, "00000001"),
    (damages.missing_version, BrokenChain, "version 1 is missing"),
]


@pytest.mark.parametrize(("damage", "kind", "message"), DAMAGES, ids=[damage.__name__ for damage, _, _ in DAMAGES])
def test_engine_refuses_a_damaged_version_and_keeps_serving(
    damage: Callable[[Path], None],
    kind: type[DeltaSnapshotError],
    message: str,
    served: Engine,
    good_run: Path,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(good_run, run)
    damage(run)
    before = (served.checksums(), served.tokens())
    served.init(sync_dir=str(run))
    with pytest.raises(kind, match=message):
        sync_llm(served.llm, 1, stage_timeout_s=20, run_id=served.run_id)
    assert (served.checksums(), served.tokens()) == before
    with pytest.raises(DeltaSnapshotError):  # the next update does not slip over the gap
        sync_llm(served.llm, 2, stage_timeout_s=0.5, run_id=served.run_id)
    assert served.checksums() == before[0]


def test_version_that_was_not_published_is_not_staged(served: Engine, good_run: Path) -> None:
    served.init(sync_dir=str(good_run))
    with pytest.raises(NotStaged, match="version 7 is not staged"):
        sync_llm(served.llm, 7, stage_timeout_s=0.1, run_id=served.run_id)


def test_folder_without_a_run_is_refused_at_init(served: Engine, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match=r"no run here.*run\.json.*DeltaPublisher"):
        served.init(sync_dir=str(tmp_path))


def test_run_of_another_base_is_refused_at_init(served: Engine, tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path / "other", seed=5)
    DeltaPublisher(model, sync_dir=str(tmp_path / "run"), base=tmp_path / "other")
    with pytest.raises(BaseMismatch, match="neither the base of the run nor one of its versions"):
        served.init(sync_dir=str(tmp_path / "run"))


def test_run_of_another_architecture_is_refused_at_init(served: Engine, tmp_path: Path) -> None:
    model = make_model("qwen2_bias", tmp_path / "other")
    DeltaPublisher(model, sync_dir=str(tmp_path / "run"), base=tmp_path / "other")
    with pytest.raises(SourceError, match=r"q_proj\.bias is not in the checkpoint"):
        served.init(sync_dir=str(tmp_path / "run"))


def test_update_before_init_is_refused(served: Engine) -> None:
    served.backend.shutdown()
    with pytest.raises(ApplyError, match="not initialized"):
        served.llm.start_weight_update()


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({}, "give"),
        ({"version": -1}, "must not be negative"),
        ({"version": "1"}, "version must be int"),
        ({"version": True}, "version must be int"),
        ({"version": 1, "target_weights_path": "/x"}, "give"),
        ({"version": 1, "action": "try"}, "action must be"),
        ({"version": 1, "timeout_s": -1}, "timeout_s must be"),
        ({"verion": 1}, "verion"),
    ],
)
def test_malformed_update_info_is_refused(
    info: dict[str, object], message: str, served: Engine, good_run: Path
) -> None:
    served.init(sync_dir=str(good_run))
    served.llm.start_weight_update()
    with pytest.raises(ValueError, match=message):
        served.llm.update_weights({"update_info": info})


def test_asking_whether_a_version_is_staged_touches_no_weight(served: Engine, good_run: Path) -> None:
    served.init(sync_dir=str(good_run))
    before = served.checksums()
    _ask(served, {"version": 0, "run": served.run_id, "action": "staged"})  # what it has
    with pytest.raises(NotStaged):
        _ask(served, {"version": 9, "run": served.run_id, "action": "staged"})
    deadline = time.monotonic() + 60
    while True:
        try:
            _ask(served, {"version": 1, "run": served.run_id, "action": "staged"})
            break
        except NotStaged:
            assert time.monotonic() < deadline
    assert served.checksums() == before
    assert served.backend._prepared is None


def _ask(served: Engine, info: dict[str, object]) -> None:
    served.llm.start_weight_update()
    served.llm.update_weights({"update_info": info})  # if it fails, vLLM closes the session
    served.llm.finish_weight_update()


def test_weights_changed_by_something_else_are_found_before_the_next_update(served: Engine, good_run: Path) -> None:
    import torch

    served.init(sync_dir=str(good_run))
    weight = served.model.get_parameter("model.layers.1.mlp.down_proj.weight")
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1.0)
    drifted = served.checksums()
    try:
        with pytest.raises(BaseMismatch, match=r"changed by something else.*layers\.1\.mlp\.down_proj"):
            sync_llm(served.llm, 1, stage_timeout_s=20, repair=False, run_id=served.run_id)
        assert served.checksums() == drifted
    finally:
        weight.detach().copy_(kept)


def test_tensor_that_the_loader_passes_over_is_left_out(served: Engine, base: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    other = tmp_path / "base"
    shutil.copytree(base, other)
    tensors = load_file(other / "model.safetensors")
    # A name that vLLM's loader passes over in silence.
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors[name] = torch.ones(16, dtype=torch.bfloat16)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    served.init(checkpoint=str(other))
    assert served.backend._fitness.choices[name].way == "unread"
    served.init(checkpoint=str(other), skip=["*rotary_emb.inv_freq"])
    assert served.backend._fitness.choices[name].way == "skip"
