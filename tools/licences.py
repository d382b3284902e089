"""The licences of what this package stands on, from the metadata of what is installed: writes docs/licences.md.

Walks from the package's own requirements, and from each extra's, to everything that these need in turn. `REFUSED` are
licences under which a program that uses a library has to carry the library's licence: the package is Apache-2.0, so it
may need nothing of that kind.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["EXTRAS", "REFUSED", "Needed", "licence_of", "needed", "table"]

PACKAGE: Final = "vllm-delta-snapshot"
EXTRAS: Final = ("", "fast", "cli", "plot", "metrics", "s3", "gcs")
"""Without `vllm`: whoever installs the plugin has it."""
REFUSED: Final = re.compile(r"\b([AL]?GPL|GNU .*General Public|SSPL|BUSL|Business Source|proprietary)", re.I)


@dataclass(frozen=True, slots=True)
class Needed:
    """A distribution that is needed.

    Attributes:
        name: its name.
        version: the one that is installed.
        licence: what its metadata says.
        extras: which extras bring it; the empty name is the package itself.
    """

    name: str
    version: str
    licence: str
    extras: tuple[str, ...]


def licence_of(name: str) -> str:
    """Return the licence of an installed distribution: its SPDX expression, or its classifiers, or what it calls it."""
    about = metadata(name)
    named = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier", []) if line.startswith("License ::")]
    said = (about.get("License-Expression") or ", ".join(named) or about.get("License") or "").strip()
    return (
        said.splitlines()[0] if said else "not stated"
    )  # older metadata may hold the whole text; it begins with its name


def needed() -> list[Needed]:
    """Return everything that the package and its extras need here, by name.

    Raises:
        PackageNotFoundError: something that is needed is not installed.
    """
    found: dict[str, set[str]] = {}
    for extra in EXTRAS:
        for name in _reached(PACKAGE, extra):
            found.setdefault(name, set()).add(extra)
    return [
        Needed(name, distribution(name).version, licence_of(name), () if "" in extras else tuple(sorted(extras)))
        for name, extras in sorted(found.items())
    ]


def _reached(name: str, extra: str) -> set[str]:
    reached: set[str] = set()
    ways = list(_requirements(name, extra))
    while ways:
        requirement = ways.pop()
        other = canonicalize_name(requirement.name)
        is_new = other not in reached
        reached.add(other)
        if is_new:
            ways += [further for wanted in ("", *requirement.extras) for further in _requirements(other, wanted)]
    return reached


def _requirements(name: str, extra: str) -> Iterator[Requirement]:
    for line in distribution(name).requires or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def table(rows: list[Needed]) -> str:
    """Return docs/licences.md."""
    lines = [
        "# Licences of what this package needs",
        "",
        "The package is Apache-2.0. It contains no code of others; what it needs is installed beside it. Written by",
        "`make licences` from the metadata of what is installed (with a CPU build of torch: CUDA builds need NVIDIA's",
        "libraries besides). A test refuses licences that would bind those who use this package (GPL, LGPL, AGPL, SSPL",
        "and the like). vLLM is none of its requirements.",
        "",
        "| distribution | looked at | licence, as its metadata states it | needed by |",
        "|---|---|---|---|",
        *(
            f"| {row.name} | {row.version} | {row.licence} | {' '.join(f'`[{e}]`' for e in row.extras) or 'all'} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        Path(sys.argv[1]).write_text(table(needed()))
    except PackageNotFoundError as error:
        sys.exit(f"{error}; run `make setup` first")
