# SPDX-License-Identifier: Apache-2.0
"""Copy a checkpoint's folder, and write patches into such a copy: files keep their headers, order and size.

The copy is neither checked nor made durable here; its owners do that.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.types import TensorPatch
from vllm_delta_snapshot.util.traffic import COPIED, count_bytes

__all__ = ["copied_files", "copy_checkpoint", "write_patches"]

_BLOCK: Final = 8 << 20
_OTHER_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_OURS: Final = "delta_snapshot"


def copied_files(checkpoint: Checkpoint) -> list[Path]:
    """Return the files of a checkpoint that a copy has: weights, configuration, tokenizer.

    Left out are weights in other forms, and this project's own notes in a folder: what they say of it (a version, a
    mirror) is not true of the copy.
    """
    weights = {file.path.name for file in checkpoint.files}
    return sorted(
        path
        for path in checkpoint.folder.iterdir()
        if path.is_file() and (path.name in weights or not _is_left_out(path.name))
    )


def _is_left_out(name: str) -> bool:
    return name.endswith(_OTHER_WEIGHTS) or name.lstrip(".").startswith(_OURS)


def copy_checkpoint(checkpoint: Checkpoint, out: Path) -> None:
    """Copy a checkpoint's files to the folder `out`, which is made if missing. Blocks.

    Bytes are read and written, never shared with the original (a reflink, a sparse file): a block that had to be found
    only when a mapping is written would end the process with SIGBUS on a full disk.

    Raises:
        OSError: a file cannot be read or written; ``filename`` says which.
    """
    out.mkdir(parents=True, exist_ok=True)
    buffer = memoryview(bytearray(_BLOCK))
    for path in copied_files(checkpoint):
        _copy_file(path, out / path.name, buffer)


def _copy_file(source: Path, target: Path, buffer: memoryview) -> None:
    current = source
    try:
        with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
            while count := reader.readinto(buffer):
                count_bytes(COPIED, count)
                current, rest = target, buffer[:count]
                while len(rest):
                    rest = rest[writer.write(rest) :]
                current = source
    except OSError as error:
        if error.filename is None:
            error.filename = str(current)
        raise


def write_patches(checkpoint: Checkpoint, out: Path, patches: Iterable[TensorPatch]) -> None:
    """Write new values into the files in `out`, and flush them to disk. Doing it twice changes nothing. Blocks.

    Args:
        checkpoint: says where each tensor lies; the files in `out` have its layout.
        out: the folder whose files are written in place.
        patches: of tensors of the checkpoint.

    Raises:
        OSError: a file cannot be opened or flushed; some patches may be written.
    """
    place_of = {name: (file.path.name, file.offset(name)) for file in checkpoint.files for name in file.specs}
    opened: dict[str, np.memmap[tuple[int], np.dtype[np.uint8]]] = {}
    for patch in patches:
        if not patch.changed:
            continue
        file, offset = place_of[patch.spec.name]
        if file not in opened:
            opened[file] = np.memmap(out / file, dtype=np.uint8, mode="r+")
        flat = opened[file][offset : offset + patch.spec.num_bytes].view(patch.spec.element.bits)
        flat[patch.positions] = patch.values
    for data in opened.values():
        data.flush()
