"""`register()`: by entry point, again and again, beside another owner of the name, and without any vLLM."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
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


class _Warnings(logging.Handler):
    """What the `vllm` logger was given, whether or not this vLLM lets it go on to the root logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    handler = _Warnings()
    logging.getLogger("vllm").addHandler(handler)
    yield handler.messages
    logging.getLogger("vllm").removeHandler(handler)


def test_entry_point_is_the_function() -> None:
    (point,) = (p for p in entry_points(group="vllm.general_plugins") if p.name == BACKEND)
    assert point.load() is register


def test_register_twice_is_silent(registry: dict[str, object], warnings: list[str]) -> None:
    register()
    register()
    assert registry[BACKEND]().__module__ == "vllm_delta_snapshot.engine.backend"
    assert warnings == []


def test_register_names_the_class_that_owns_the_name(registry: dict[str, object], warnings: list[str]) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLWeightTransferEngine

    WeightTransferEngineFactory.register_engine(BACKEND, SparseNCCLWeightTransferEngine)
    register()
    (message,) = warnings
    assert "vllm.distributed.weight_transfer.sparse_nccl_engine.SparseNCCLWeightTransferEngine" in message


def test_register_survives_an_owner_that_cannot_be_loaded(registry: dict[str, object], warnings: list[str]) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "no_such_module", "Engine")
    register()
    assert len(warnings) == 1


def test_this_vllm_is_one_of_the_tested_ones(warnings: list[str]) -> None:
    from vllm_delta_snapshot.engine.compat import check_vllm

    check_vllm()
    assert warnings == []


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
