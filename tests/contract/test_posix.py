"""The POSIX adapter keeps the contract of a store."""

from pathlib import Path

import pytest

from tests.contract.store_contract import StoreContract
from vllm_delta_snapshot.store.posix import PosixStore


class TestPosixStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> PosixStore:
        return PosixStore(tmp_path / "store")
