"""Stores are what is tested here, not the compiled kernel, which takes longer to compile than most of these tests."""

from tests.unit.conftest import _without_kernel

__all__ = ["_without_kernel"]
