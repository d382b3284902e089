# SPDX-License-Identifier: Apache-2.0
"""Where things lie in a run's folder: keys, and nothing that reads or writes them.

Version numbers are padded to eight digits, so that a listing in name order is a listing in version order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from vllm_delta_snapshot.errors import CorruptFile, LimitExceeded

__all__ = [
    "ACKS_FOLDER",
    "ANCHORS_FOLDER",
    "DELTAS_FOLDER",
    "MAX_VERSION",
    "MERGED_FOLDER",
    "METADATA_NAME",
    "PRUNED_FOLDER",
    "RUN_KEY",
    "VERSIONS_FOLDER",
    "anchor_folder",
    "anchor_key",
    "check_file_name",
    "delta_file_name",
    "delta_folder",
    "merged_folder",
    "merged_key",
    "merged_of_key",
    "numbers_of",
    "pruned_key",
    "step_of_merged",
    "version_key",
    "version_of_anchor",
    "version_of_delta",
    "version_of_key",
]

RUN_KEY: Final = "run.json"
VERSIONS_FOLDER: Final = "versions"
DELTAS_FOLDER: Final = "deltas"
ANCHORS_FOLDER: Final = "anchors"
MERGED_FOLDER: Final = "merged"
PRUNED_FOLDER: Final = "pruned"
ACKS_FOLDER: Final = "acks"
METADATA_NAME: Final = "metadata.json"
MAX_VERSION: Final = 99_999_999

_VERSION_NAME: Final = re.compile(r"([0-9]{8})\.json")
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_DELTA_FOLDER: Final = re.compile(r"deltas/([0-9]{8})-([0-9a-f]{8})")
_ANCHOR_FOLDER: Final = re.compile(r"anchors/([0-9]{8})-([0-9a-f]{8})")
_MERGED_FOLDER: Final = re.compile(r"merged/([0-9]{8})-([0-9]{8})-([0-9a-f]{8})")
_MERGED_NAME: Final = re.compile(r"([0-9]{8})-([0-9]{8})\.json")


def version_key(version: int) -> str:
    """Return the key of the commit object of a version.

    Raises:
        LimitExceeded: the version needs more than eight digits, or is negative.
    """
    return f"{VERSIONS_FOLDER}/{_padded(version)}.json"


def numbers_of(names: Iterable[str]) -> list[int]:
    """Return the versions that names in a folder of records are of, ascending; other names are none."""
    return sorted(version for version in map(version_of_key, names) if version is not None)


def anchor_key(version: int) -> str:
    """Return the key of the record of an anchor. Raises: see `version_key`."""
    return f"{ANCHORS_FOLDER}/{_padded(version)}.json"


def merged_key(base_version: int, version: int) -> str:
    """Return the key of the record of a merged delta. Raises: see `version_key`."""
    return f"{MERGED_FOLDER}/{_padded(base_version)}-{_padded(version)}.json"


def pruned_key(version: int) -> str:
    """Return the key that says that deltas up to and including `version` are gone. Raises: see `version_key`."""
    return f"{PRUNED_FOLDER}/{_padded(version)}.json"


def version_of_key(name: str) -> int | None:
    """Return the version that a name in `versions/`, `anchors/` or `pruned/` stands for; ``None`` for anything else."""
    match = _VERSION_NAME.fullmatch(name)
    return int(match[1]) if match else None


def merged_of_key(name: str) -> tuple[int, int] | None:
    """Return base version and version that a name in the folder of merged deltas stands for."""
    match = _MERGED_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def _padded(version: int) -> str:
    if not 0 <= version <= MAX_VERSION:
        raise LimitExceeded("version out of range", expected=f"0 to {MAX_VERSION}", found=version)
    return f"{version:08d}"


def delta_folder(version: int, publication_id: str) -> str:
    """Return the folder of a delta. The publication id keeps two writers, or a retry, from mixing files."""
    return f"{DELTAS_FOLDER}/{version:08d}-{publication_id[:8]}"


def version_of_delta(folder: str) -> int | None:
    """Return the version that a folder under `deltas/` belongs to; ``None`` for anything else."""
    match = _DELTA_FOLDER.fullmatch(folder)
    return int(match[1]) if match else None


def anchor_folder(version: int, publication_id: str) -> str:
    """Return the folder of an anchor's files."""
    return f"{ANCHORS_FOLDER}/{_padded(version)}-{publication_id[:8]}"


def merged_folder(base_version: int, version: int, publication_id: str) -> str:
    """Return the folder of a merged delta."""
    return f"{MERGED_FOLDER}/{_padded(base_version)}-{_padded(version)}-{publication_id[:8]}"


def version_of_anchor(folder: str) -> int | None:
    """Return the version that a folder under `anchors/` belongs to; ``None`` for anything else."""
    match = _ANCHOR_FOLDER.fullmatch(folder)
    return int(match[1]) if match else None


def step_of_merged(folder: str) -> tuple[int, int] | None:
    """Return base version and version that a folder under `merged/` belongs to; ``None`` for anything else."""
    match = _MERGED_FOLDER.fullmatch(folder)
    return (int(match[1]), int(match[2])) if match else None


def delta_file_name(number: int | None) -> str:
    """Return the name of a payload file.

    Args:
        number: which it is, from 0; ``None`` if it is the only one, which has OpenRL's name. A file is written before
            it is known how many there will be.
    """
    return "delta.safetensors" if number is None else f"delta-{number + 1:05d}.safetensors"


def check_file_name(name: str) -> str:
    """Return `name` if it is a plain file name that stays inside its folder.

    Raises:
        CorruptFile: it has a separator, starts with a dot, or is too long.
    """
    if not _FILE_NAME.fullmatch(name):
        raise CorruptFile("unsafe file name", expected="letters, digits, '.', '_', '-'", found=repr(name))
    return name
