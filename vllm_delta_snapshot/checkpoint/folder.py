# SPDX-License-Identifier: Apache-2.0
"""A local Hugging Face checkpoint: its table of tensors and their bits, mapped, not loaded.

Where it lies says `base_folder`, and which files are taken `weight_files`. Every tensor is in one file, and those that
an index names are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from vllm_delta_snapshot.checkpoint.base_folder import find_base, reading
from vllm_delta_snapshot.checkpoint.hub_cache import INDEX_NAME
from vllm_delta_snapshot.checkpoint.weight_files import some, weight_files
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import CorruptFile, SourceError
from vllm_delta_snapshot.format.digest import format_digest, state_digest
from vllm_delta_snapshot.format.safetensors_io import MappedFile
from vllm_delta_snapshot.types import TensorSpec
from vllm_delta_snapshot.util.traffic import COPIED, count_bytes

__all__ = ["INDEX_NAME", "Checkpoint"]


class Checkpoint:
    """See the module.

    Args:
        folder: a local folder with safetensors files, or a Hub id that the local cache has; see `find_base`.

    Attributes:
        folder: the folder, absolute.
        specs: the tensors by name.

    Raises:
        ObjectNotFound: no such folder, or no safetensors files in it, or some are missing.
        StoreError: it may not be read.
        CorruptFile, UnsupportedFormat: a file is damaged, or has element types that cannot be patched.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = find_base(folder)
        files = weight_files(self.folder)
        self.files = [_mapped(path) for path in files.paths]
        self.specs: dict[str, TensorSpec] = {}
        self._file_of: dict[str, MappedFile] = {}
        for file in self.files:
            for name, spec in file.specs.items():
                if name in self.specs:
                    raise _doubled(name, self._file_of[name].path, file.path)
                self.specs[name] = spec
                self._file_of[name] = file
        if lost := sorted(files.index.keys() - self.specs.keys()):
            raise _lost(lost, self.folder / INDEX_NAME)

    def bits(self, name: str) -> Bits:
        """Return all elements of a tensor, flat: a read-only view of the mapped file."""
        return self._file_of[name].bits(name)

    def items(self) -> Iterator[tuple[TensorSpec, Bits]]:
        """Yield every tensor and its bits."""
        for name, spec in self.specs.items():
            yield spec, self.bits(name)

    def _counted(self) -> Iterator[tuple[TensorSpec, Bits]]:
        for spec, bits in self.items():
            yield spec, bits
            count_bytes(COPIED, bits.nbytes)

    @cached_property
    def state_digest(self) -> str:
        """The state digest of the checkpoint. Reads every byte, once."""
        return format_digest(state_digest(self._counted()))

    @property
    def total_elements(self) -> int:
        """Elements of all tensors."""
        return sum(spec.numel for spec in self.specs.values())

    def check_fits(self, specs: dict[str, TensorSpec], *, what: str) -> None:
        """Compare the table of tensors with another one.

        Args:
            specs: the other table, for instance a run's.
            what: what the other table belongs to, for the message.

        Raises:
            SourceError: a name is missing on either side, or a shape or element type differs.
        """
        problems = [f"{name} is not in the checkpoint" for name in specs if name not in self.specs]
        problems += [f"{name} is not in {what}" for name in self.specs if name not in specs]
        problems += [
            f"{name} is {self.specs[name]} but {spec} in {what}"
            for name, spec in specs.items()
            if name in self.specs and self.specs[name] != spec
        ]
        if problems:
            more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise SourceError(
                f"the checkpoint does not fit {what}",
                file=str(self.folder),
                found="; ".join(problems[:8]) + more,
                hint="Trainer and engines must start from the same checkpoint.",
            )


def _mapped(path: Path) -> MappedFile:
    with reading(path):
        return MappedFile(path)


def _doubled(name: str, first: Path, second: Path) -> CorruptFile:
    # Loaders take both, in whatever order, so nobody can say which of them is the weight.
    return CorruptFile(
        "tensor lies in two files",
        file=str(second),
        tensor=name,
        expected="every tensor once",
        found=f"it is in {first.name} and in {second.name}",
        hint="Remove the file that is not part of this checkpoint, or write it anew: model.save_pretrained(folder).",
    )


def _lost(names: list[str], index: Path) -> CorruptFile:
    return CorruptFile(
        "the index names tensors that none of its files has",
        file=str(index),
        tensor=names[0],
        found=f"{len(names)} missing: {some(names)}",
        hint="Write or download the checkpoint again.",
    )
