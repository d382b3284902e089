"""The notes of a release: ``python tools/release_notes.py v1.2.3`` prints the changelog's section of that version.

Fails if the tag is not the version that would be built, or if the changelog does not say what is in it. Needs nothing
but Python.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

__all__ = ["notes"]

_ROOT: Final = Path(__file__).parents[1]


def notes(tag: str, version: str, changelog: str) -> str:
    """Return what the changelog says of a version.

    Raises:
        ValueError: the tag is not that of this version, or there is no section of it, or an empty one.
    """
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, but what would be built is version {version}: expected v{version}")
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d{{2}}-\d{{2}}$"
    found = re.search(rf"{heading}(.*?)(?=^## |^\[[^\]]+\]: |\Z)", changelog, re.MULTILINE | re.DOTALL)
    text = found.group(1).strip() if found else ""
    if not text:
        raise ValueError(f"CHANGELOG.md says nothing of {version}: expected a section '## [{version}] - YYYY-MM-DD'")
    return text + "\n"


def _built_version() -> str:
    found = re.search(
        r'^__version__ = "(.+)"$', (_ROOT / "vllm_delta_snapshot" / "_version.py").read_text(), re.MULTILINE
    )
    if found is None:
        raise ValueError("vllm_delta_snapshot/_version.py holds no version")
    return found.group(1)


if __name__ == "__main__":
    try:
        sys.stdout.write(notes(sys.argv[1], _built_version(), (_ROOT / "CHANGELOG.md").read_text()))
    except ValueError as error:
        sys.exit(str(error))
