# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces joined by a link of a given rate: a trainer's cluster and a sampler's, on one machine.

Each side has its own loopback and one address on the link; nothing else can be reached. A thread enters a side with
``with sides.near():``; sockets it opens and processes it starts live there. Needs Linux, root, `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["TwoSides", "two_sides", "why_not"]

_NEW_NET: Final = 0x40000000
"""CLONE_NEWNET, of linux/sched.h."""
_BURST_KB: Final = 128
_LATENCY_MS: Final = 50


@dataclass(frozen=True, slots=True)
class TwoSides:
    """See the module.

    Attributes:
        near_address: the near side's address on the link.
        far_address: the far side's.
        names: of the two namespaces.
    """

    near_address: str
    far_address: str
    names: tuple[str, str]

    def near(self) -> contextlib.AbstractContextManager[None]:
        """Enter the near side, with this thread."""
        return _within(self.names[0])

    def far(self) -> contextlib.AbstractContextManager[None]:
        """Enter the far side, with this thread."""
        return _within(self.names[1])


def why_not() -> str | None:
    """Say why there can be no two sides here; ``None`` if there can."""
    if os.name != "posix" or not Path("/proc/self/ns/net").exists():
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} (iproute2)"
    try:
        with two_sides(mbit=100):
            return None
    except (subprocess.CalledProcessError, OSError) as error:
        said = getattr(error, "stderr", None) or error
        return f"network namespaces are not permitted: {' '.join(str(said).split())}"


@contextlib.contextmanager
def two_sides(*, mbit: float) -> Iterator[TwoSides]:
    """Make two sides; they are gone afterwards, and what ran there is without a network then.

    Args:
        mbit: the rate of the link, in Mbit/s, each way.

    Raises:
        CalledProcessError: the kernel does not permit it; ``stderr`` says why.
        OSError: `ip` or `tc` cannot be run.
    """
    number = os.getpid() % 10_000
    names = (f"near-{number}", f"far-{number}")
    ends = (f"nr{number}", f"fr{number}")
    sides = TwoSides("10.77.0.1", "10.77.0.2", names)
    made: list[str] = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        _run(
            "ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1]
        )
        for name, end, address in zip(names, ends, (sides.near_address, sides.far_address), strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", end)
            for device in ("lo", end):
                _run("ip", "-n", name, "link", "set", device, "up")
            shape = ("rate", f"{mbit:g}mbit", "burst", f"{_BURST_KB}kb", "latency", f"{_LATENCY_MS}ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", *shape)
        yield sides
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)  # noqa: S607


@contextlib.contextmanager
def _within(name: str) -> Iterator[None]:
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        there = os.open(f"/run/netns/{name}", os.O_RDONLY)
        try:
            _enter(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _enter(before)
    finally:
        os.close(before)


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _NEW_NET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
