# SPDX-License-Identifier: Apache-2.0
"""From what people call a checkpoint to the folder that it lies in, and to the files in there that hold its weights.

A path is made absolute here, once, so that it means the same in run.json and in other processes; links stay, since the
files of a Hub snapshot are links. A Hub id is looked up in the local cache and nowhere else: this never downloads. What
cannot be a checkpoint is refused by what it is. No tensor is looked at.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from vllm_delta_snapshot.errors import CorruptFile, FormatError, ObjectNotFound, StoreError
from vllm_delta_snapshot.format.layout import check_file_name
from vllm_delta_snapshot.format.metadata import MAX_METADATA_BYTES
from vllm_delta_snapshot.regular_file import read_bounded

__all__ = ["INDEX_NAME", "find_base", "weight_files"]

INDEX_NAME: Final = "model.safetensors.index.json"

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")
_LISTED: Final = 5


def find_base(base: str | Path, *, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """Return the absolute path of a checkpoint's folder. Reads no file of it.

    Args:
        base: a local folder, relative or with ``~`` too; or a Hub id, ``"org/model"``, which the local cache has. A
            folder of that name goes first.
        revision: of the Hub; by default what ``main`` was when it was downloaded.
        cache_dir: where the Hub's cache is; by default where huggingface_hub has it.

    Raises:
        ObjectNotFound: there is no such folder, and no such snapshot in the cache; or it is a file.
        StoreError: it may not be read.
    """
    with _reading(base):
        folder = Path(base).expanduser()
        if folder.is_dir():
            return folder.absolute()
        if folder.exists():
            raise ObjectNotFound(
                "the checkpoint is a file, not a folder",
                file=str(folder.absolute()),
                hint=f"Give the folder that it lies in: {folder.absolute().parent}",
            )
    name = str(base)
    if not _HUB_ID.fullmatch(name):
        raise ObjectNotFound(
            "no such checkpoint folder",
            file=str(folder.absolute()),
            hint='Give a local folder with safetensors files, or a Hub id ("org/model") that was downloaded.',
        )
    return _in_hub_cache(name, folder, revision, cache_dir)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: those of its index if it has one, else all in the folder.

    Raises:
        ObjectNotFound: there are none, or the index names some that are not there.
        CorruptFile: the index is broken.
        StoreError: the folder may not be read.
    """
    with _reading(folder):
        if (folder / INDEX_NAME).exists():
            return _indexed(folder)
        names = sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors" and path.is_file())
        files = [folder / name for name in names if not name.startswith(("consolidated", "adapter_model"))]
        if not files:
            raise _no_weights(folder, names)
        return files


def _indexed(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    again = f"Write or download it again; or remove {INDEX_NAME}, if the folder has no other safetensors files."
    try:
        names = sorted(set(json.loads(read_bounded(index, MAX_METADATA_BYTES))["weight_map"].values()))
        files = [folder / check_file_name(name) for name in names]
    except FormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile("not a safetensors index", file=str(index), found=error, hint=again) from error
    if not files:
        raise CorruptFile("the safetensors index names no file", file=str(index), hint=again)
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise ObjectNotFound(
            "files of the checkpoint are missing, which its index names",
            file=str(folder / missing[0]),
            expected=f"{len(files)} files",
            found=f"{len(missing)} missing: {_some(missing)}",
            hint=_again(folder),
        )
    return files


def _no_weights(folder: Path, safetensors: list[str]) -> ObjectNotFound:
    others = sorted(path.name for path in folder.iterdir() if path.name not in safetensors)
    pickles = [name for name in others if name.endswith(_PICKLES)]
    below = [name for name in others if any((folder / name).glob("*.safetensors"))]
    found, hint = "nothing" if not others else _some(others), None
    if any(name.startswith("adapter_model") for name in safetensors):
        found, hint = _some(safetensors), "This is an adapter (PEFT). Give the checkpoint that it was trained on."
    elif safetensors:
        found = f"{_some(safetensors)}, which is Mistral's own layout"
        hint = "Download the model.safetensors files of the same model too."
    elif below:
        hint = f"Its folder {below[0]} has some: {folder / below[0]}"
    elif pickles:
        found, hint = f"only pickles: {_some(pickles)}", None
    return ObjectNotFound(
        "no safetensors files in the checkpoint",
        file=str(folder),
        found=found,
        hint=hint or "Write it with model.save_pretrained(folder), which saves safetensors.",
    )


def _in_hub_cache(name: str, folder: Path, revision: str | None, cache_dir: str | None) -> Path:
    """Return the newest snapshot of a Hub id in the local cache; no network."""
    missing = f"no such checkpoint folder, nor is a model {name} in the local Hub cache"
    download = f"hf download {name}"
    download += f" --revision {revision}" if revision else ""
    download += f" --cache-dir {cache_dir}" if cache_dir else ""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ObjectNotFound(
            "no such checkpoint folder, and without huggingface_hub no Hub id can be looked up",
            file=str(folder.absolute()),
            hint=f"If {name} is a Hub id: pip install huggingface_hub, then {download}",
        ) from error
    try:
        found = snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True)
    except Exception as error:
        raise ObjectNotFound(missing, file=str(folder.absolute()), found=error, hint=f"Download it: {download}") from (
            error
        )
    return Path(found).absolute()


def _again(folder: Path) -> str:
    """Say how what is missing is to be had: a snapshot in the Hub cache says where it is from."""
    for part in folder.parts:
        if part.startswith("models--"):
            return f"Download the rest: hf download {part.removeprefix('models--').replace('--', '/', 1)}"
    return "Download or copy the checkpoint again."


@contextmanager
def _reading(place: str | Path) -> Iterator[None]:
    """Turn what the system says of a place into an error of ours."""
    try:
        yield
    except (ObjectNotFound, FormatError):
        raise
    except PermissionError as error:
        raise StoreError(
            "the checkpoint may not be read",
            file=str(error.filename or place),
            found=error.strerror,
            hint=f"Give uid {os.geteuid()} the right to read it, and to search the folders above it.",
        ) from error
    except (OSError, RuntimeError, ValueError) as error:  # no such home; a name too long, or with a null in it
        raise ObjectNotFound("no checkpoint can lie there", file=str(place), found=error) from error


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
