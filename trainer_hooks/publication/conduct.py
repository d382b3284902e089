# SPDX-License-Identifier: Apache-2.0
"""How a publisher shares its time with the trainer: what its calls wait for, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Conduct", "WhenBusy"]

WhenBusy = Literal["wait", "merge"]


@dataclass(frozen=True, slots=True)
class Conduct:
    """How a publisher shares its time with the trainer.

    Attributes:
        asynchronous: whether `publish` returns after the diff, and the rest runs behind it.
        when_busy: what `publish` does while the publication before it still runs.
        drain_timeout_s: how long the end waits for a publication under way.

    Raises:
        ValueError: there is no such `when_busy`.
    """

    asynchronous: bool
    when_busy: WhenBusy
    drain_timeout_s: float

    def __post_init__(self) -> None:
        if self.when_busy not in get_args(WhenBusy):
            raise ValueError(f"when_busy must be one of {get_args(WhenBusy)}, not {self.when_busy!r}")

    @property
    def may_skip(self) -> bool:
        """Whether a call may be left to the next one."""
        return self.when_busy == "merge"
