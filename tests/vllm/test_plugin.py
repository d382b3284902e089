"""`register()`: by entry point, again and again, beside another owner of the name, and without any vLLM."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from vllm_delta_snapshot.plugin import BACKEND, register


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    copy = dict(WeightTransferEngineFactory._registry)
    copy.pop(BACKEND, None)
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", copy)
    return copy


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_entry_point_is_the_function() -> None:
    (point,) = (p for p in entry_points(group="vllm.general_plugins") if p.name == BACKEND)
    assert point.load() is register


def test_register_twice_is_silent(registry: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm").addHandler(caplog.handler)
    register()
    register()
    logging.getLogger("vllm").removeHandler(caplog.handler)
    assert registry[BACKEND]().__module__ == "vllm_delta_snapshot.engine.backend"
    assert _warnings(caplog) == []


def test_register_names_the_class_that_owns_the_name(
    registry: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLWeightTransferEngine

    WeightTransferEngineFactory.register_engine(BACKEND, SparseNCCLWeightTransferEngine)
    logging.getLogger("vllm").addHandler(caplog.handler)
    register()
    logging.getLogger("vllm").removeHandler(caplog.handler)
    (message,) = _warnings(caplog)
    assert "vllm.distributed.weight_transfer.sparse_nccl_engine.SparseNCCLWeightTransferEngine" in message


def test_register_survives_an_owner_that_cannot_be_loaded(
    registry: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "no_such_module", "Engine")
    logging.getLogger("vllm").addHandler(caplog.handler)
    register()
    logging.getLogger("vllm").removeHandler(caplog.handler)
    assert len(_warnings(caplog)) == 1


def test_register_without_vllm_does_not_raise() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from vllm_delta_snapshot.plugin import register\n"
        "register(); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "alive\n"


def test_register_does_not_import_the_engine() -> None:
    code = (
        "import sys, vllm.distributed.weight_transfer.factory\n"
        "from vllm_delta_snapshot.plugin import register\n"
        "register(); print('vllm_delta_snapshot.engine.backend' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
