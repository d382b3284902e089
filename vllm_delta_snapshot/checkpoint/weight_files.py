# SPDX-License-Identifier: Apache-2.0
"""Which files of a checkpoint's folder hold its weights: what vLLM and transformers would both load, or an error.

The files of ``model.safetensors.index.json`` if there is one, else every ``*.safetensors``. Where the two loaders would
take different ones, where one of the files is missing, or where it is only known by its name that one is, the folder is
refused: a part of a checkpoint would otherwise pass for the whole. No tensor is looked at.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vllm_delta_snapshot.checkpoint.base_folder import reading
from vllm_delta_snapshot.checkpoint.hub_cache import INDEX_NAME, HubId
from vllm_delta_snapshot.errors import CorruptFile, FormatError, ObjectNotFound
from vllm_delta_snapshot.format.layout import check_file_name
from vllm_delta_snapshot.format.metadata import MAX_METADATA_BYTES
from vllm_delta_snapshot.format.wire import unique_pairs
from vllm_delta_snapshot.util.regular_file import read_bounded

__all__ = ["WeightFiles", "some", "weight_files"]

_SINGLE: Final = "model.safetensors"
_ADAPTER: Final = "adapter_model"
_MISTRAL: Final = "consolidated"  # the same weights a second time, under that name and in another layout
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")
_NUMBERED: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
_MAX_SHARDS: Final = 100_000
_LISTED: Final = 5


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files.

    Attributes:
        paths: in the order of their names.
        index: which file holds a tensor, as the index says; empty if there is none.
    """

    paths: Sequence[Path]
    index: Mapping[str, str] = field(default_factory=dict)


def weight_files(folder: Path) -> WeightFiles:
    """Return the safetensors files of a checkpoint.

    Raises:
        ObjectNotFound: there are none, or some are missing.
        CorruptFile: the index is broken, or it cannot be said which files are the checkpoint.
        LimitExceeded: the index is too large.
        StoreError: the folder may not be read.
    """
    with reading(folder):
        if os.path.lexists(folder / INDEX_NAME):
            files = _indexed(folder)
        else:
            files = WeightFiles([folder / name for name in _all_names(folder)])
        for path in files.paths:
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block whoever maps it
                raise CorruptFile("not a regular file", file=str(path), hint=_again(folder))
        return files


def some(names: Sequence[str]) -> str:
    """List names, the first few."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _indexed(folder: Path) -> WeightFiles:
    path = folder / INDEX_NAME
    if not path.exists():
        raise ObjectNotFound(
            "the index of the checkpoint is a link to nothing",
            file=str(path),
            found=f"a link to {path.readlink()}, which is not there",
            hint=_again(folder),
        )
    again = f"Write or download it again; or remove {INDEX_NAME}, if the folder has no other safetensors files."
    try:
        index = json.loads(read_bounded(path, MAX_METADATA_BYTES), object_pairs_hook=unique_pairs)["weight_map"]
        names = [check_file_name(name) for name in sorted(set(index.values()))]
    except FormatError as error:
        raise error.placed(file=str(path), hint=again) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile("not a safetensors index", file=str(path), found=error, hint=again) from error
    if not names:
        raise CorruptFile("the safetensors index names no file", file=str(path), hint=again)
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise _missing(folder, missing, f"{len(names)} files, which its index names")
    if os.path.lexists(folder / _SINGLE) and _SINGLE not in names:
        raise CorruptFile(
            "two checkpoints in one folder: transformers would load one, vLLM the other",
            file=str(folder),
            expected="a file, or an index and its files",
            found=f"{_SINGLE}, and {INDEX_NAME} of {some(names)}",
            hint="Move away the one that is not meant.",
        )
    return WeightFiles([folder / name for name in names], index)


def _all_names(folder: Path) -> list[str]:
    there = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors") and not name.startswith("."))
    names = [name for name in there if not name.startswith((_MISTRAL, _ADAPTER))]
    if not names:
        raise _no_weights(folder, there)
    adapters = [name for name in there if name.startswith(_ADAPTER)]
    if adapters:
        raise CorruptFile(
            "an adapter lies in the checkpoint's folder, whose tensors vLLM would load as the model's",
            file=str(folder / adapters[0]),
            hint="Move it to a folder of its own.",
        )
    lost = [name for name in names if not (folder / name).exists()]  # links to nothing
    lost += sorted(_unseen_shards(names))
    if lost:
        raise _missing(folder, lost, "as many as the names of the others say")
    return names


def _unseen_shards(names: Sequence[str]) -> set[str]:
    """Return the shards that are not there: where one is called 1 of 3, there are two others."""
    unseen: set[str] = set()
    for match in filter(None, map(_NUMBERED.fullmatch, names)):
        count, digits = int(match["count"]), len(match["number"])
        first = 0 if any(_is_number_0(other, match) for other in names) else 1
        numbers = range(first, min(count, _MAX_SHARDS) + first)
        unseen |= {f"{match['stem']}-{n:0{digits}d}-of-{match['count']}.safetensors" for n in numbers}
    return unseen - set(names)


def _is_number_0(name: str, like: re.Match[str]) -> bool:
    match = _NUMBERED.fullmatch(name)
    return (
        match is not None and int(match["number"]) == 0 and match.group("stem", "count") == like.group("stem", "count")
    )


def _missing(folder: Path, missing: Sequence[str], expected: str) -> ObjectNotFound:
    return ObjectNotFound(
        "files of the checkpoint are missing",
        file=str(folder / missing[0]),
        expected=expected,
        found=f"{len(missing)} missing: {some(missing)}",
        hint=_again(folder),
    )


def _no_weights(folder: Path, there: Sequence[str]) -> ObjectNotFound:
    others = sorted(set(os.listdir(folder)) - set(there))
    pickles = [name for name in others if name.endswith(_PICKLES)]
    below = [name for name in others if any((folder / name).glob("*.safetensors"))]
    origin = HubId.of_snapshot(folder)
    found, hint = (
        some(others) or "an empty folder",
        "Write it with model.save_pretrained(folder), which saves safetensors.",
    )
    if any(name.startswith(_ADAPTER) for name in there):
        found, hint = some(there), "This is an adapter (PEFT). Give the checkpoint that it was trained on."
    elif there:
        found = f"{some(there)}, which is Mistral's own layout"
        hint = "Download the model.safetensors files of the same model too."
    elif below:
        hint = f"Its folder {below[0]} has some: {folder / below[0]}"
    elif pickles:
        found = f"only pickles: {some(pickles)}"
        hint = f"Load it once and write it again: {hint[0].lower()}{hint[1:]}"
    elif origin is not None:
        hint = f"Give {origin} as the base; to download it: {origin.download}"
    return ObjectNotFound("no safetensors files in the checkpoint", file=str(folder), found=found, hint=hint)


def _again(folder: Path) -> str:
    """Say how what is missing is to be had: a snapshot in the Hub cache says where it is from."""
    origin = HubId.of_snapshot(folder)
    return "Copy the checkpoint again." if origin is None else f"Download the rest: {origin.download}"
