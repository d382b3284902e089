"""Pages, too, compare with numpy alone and wait for no disk; what they start in processes of its own does not."""

from tests.unit.conftest import _without_kernel, _without_waiting_for_the_disk

__all__ = ["_without_kernel", "_without_waiting_for_the_disk"]
