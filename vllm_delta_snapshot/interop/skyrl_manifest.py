# SPDX-License-Identifier: Apache-2.0
"""manifest.json of a SkyRL delta: the model of its fields, and the checks that need nothing but the manifest.

After `read_manifest` every tensor has a known type and a size that fits its shape, names are unique, file names stay in
the folder, totals are sums. Payload files are not looked at here (`skyrl`).
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final

from pydantic import ConfigDict, FailFast, Field

from vllm_delta_snapshot.dtypes import dtype_of_torch_name
from vllm_delta_snapshot.errors import (
    CorruptFile,
    FormatError,
    LimitExceeded,
    ObjectNotFound,
    StoreUnavailable,
    UnsupportedFormat,
)
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.metadata import MAX_METADATA_BYTES
from vllm_delta_snapshot.format.safetensors_io import MAX_DIMENSIONS
from vllm_delta_snapshot.format.wire import Count, Name, WireModel
from vllm_delta_snapshot.types import TensorSpec
from vllm_delta_snapshot.util.regular_file import read_bounded

__all__ = ["MANIFEST_NAME", "SkyRLManifest", "SkyRLTensor", "delta_name", "delta_version", "explained", "read_manifest"]

MANIFEST_NAME: Final = "manifest.json"

_DIGITS: Final = {"xxh3-128": 32, "sha256": 64}
"""The checksums that SkyRL uses, and how many hexadecimal digits each has."""

_FOLDER: Final = re.compile(r"delta-([0-9]{8})")
_HINT: Final = "Copy the folder again from where SkyRL published it; nothing of it was used."


class SkyRLTensor(WireModel):
    """One changed tensor. Fields beside these are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    name: Name
    dtype: str
    shape: Annotated[tuple[Count, ...], Field(max_length=MAX_DIMENSIONS)]
    uncompressed_num_bytes: Count
    compressed_num_bytes: Count
    payload_file: str
    payload_key: str
    checksum: str | None = None
    checksum_algorithm: str | None = None
    sha256: str | None = None
    """What earlier writers called the checksum."""

    @property
    def algorithm(self) -> str:
        """Which checksum it is."""
        if self.checksum_algorithm is not None:
            return self.checksum_algorithm
        return "sha256" if self.checksum is None else "xxh3-128"

    @property
    def digest(self) -> str:
        """The checksum of the new tensor's bytes, hexadecimal; empty if there is none."""
        return (self.sha256 if self.checksum is None else self.checksum) or ""

    def spec(self) -> TensorSpec:
        """Return the tensor.

        Raises:
            UnsupportedFormat: its element type is not one that a checkpoint of ours has.
        """
        return TensorSpec(self.name, self.shape, dtype_of_torch_name(self.dtype).code)


class SkyRLManifest(WireModel):
    """A whole manifest. Fields beside these are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    version: int = Field(ge=1, le=layout.MAX_VERSION)
    base_version: int = Field(ge=0, le=layout.MAX_VERSION)
    tensors: Annotated[tuple[SkyRLTensor, ...], FailFast()]
    total_uncompressed_num_bytes: Count
    total_compressed_num_bytes: Count
    payload_files: Annotated[tuple[str, ...], FailFast()]


def delta_name(version: int) -> str:
    """Return the name of a version's folder in a SkyRL sync_dir."""
    return f"delta-{version:08d}"


def delta_version(name: str) -> int | None:
    """Return the version that a folder's name stands for (``delta-00000042``); ``None`` for any other name."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def read_manifest(folder: Path) -> SkyRLManifest:
    """Read manifest.json of a local SkyRL delta and check all that can be checked without its payload.

    Raises:
        ObjectNotFound: the folder has none, so it was not committed.
        CorruptFile: not JSON, a field is missing or wrong, or it contradicts itself.
        UnsupportedFormat: an element type or a checksum that this reader does not know.
        LimitExceeded: it is larger than a reader accepts.
        StoreUnavailable: it cannot be read.
    """
    path = folder / MANIFEST_NAME
    with explained(path):
        manifest = SkyRLManifest.from_json(_read(path), file=str(path))
        _check_versions(manifest, delta_version(folder.resolve().name))
        _check_unique("tensor", (tensor.name for tensor in manifest.tensors))
        for tensor in manifest.tensors:
            with explained(path, tensor.name):
                _check_tensor(tensor)
        _check_files(manifest)
        _check_totals(manifest)
    return manifest


@contextlib.contextmanager
def explained(file: Path, tensor: str | None = None) -> Iterator[None]:
    """Add to an error about the format what it does not say itself: file, tensor, and what to do.

    Raises:
        FormatError: of the same class.
        StoreUnavailable: the file cannot be read.
    """
    try:
        yield
    except FormatError as error:
        raise type(error)(
            error.what,
            file=error.file or str(file),
            tensor=error.tensor or tensor,
            expected=error.expected,
            found=error.found,
            hint=error.hint or _HINT,
        ) from error
    except OSError as error:
        if isinstance(error, ObjectNotFound):
            raise
        raise StoreUnavailable("cannot be read", file=str(file), found=error) from error


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, MAX_METADATA_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise ObjectNotFound(
            "no manifest.json, so this is no SkyRL delta, or one that was not committed",
            file=str(path),
            hint="A SkyRL delta holds manifest.json, written last, and the payload files that it lists.",
        ) from None


def _check_versions(manifest: SkyRLManifest, version: int | None) -> None:
    if version not in (None, manifest.version):
        raise CorruptFile(
            "the manifest is of another version than its folder", expected=version, found=manifest.version
        )
    if manifest.base_version >= manifest.version:
        raise CorruptFile(
            "the delta does not lead to a later version",
            expected=f"a base version before {manifest.version}",
            found=manifest.base_version,
        )


def _check_unique(what: str, names: Iterable[str]) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise CorruptFile(f"a {what} appears twice", tensor=twice if what == "tensor" else None, found=twice)


def _check_tensor(tensor: SkyRLTensor) -> None:
    layout.check_file_name(tensor.payload_file)
    spec = tensor.spec()
    if spec.num_bytes >= 2**63:
        raise LimitExceeded("tensor too large", found=str(spec))
    if tensor.uncompressed_num_bytes != spec.num_bytes:
        raise CorruptFile(
            "the size does not fit the shape",
            expected=f"{spec.num_bytes} bytes for {spec}",
            found=f"{tensor.uncompressed_num_bytes} bytes",
        )
    digits = _DIGITS.get(tensor.algorithm)
    if digits is None:
        raise UnsupportedFormat(
            "unknown checksum",
            expected=" ".join(_DIGITS),
            found=repr(tensor.algorithm[:80]),
            hint="Update vllm-delta-snapshot.",
        )
    if not re.fullmatch(f"[0-9a-f]{{{digits}}}", tensor.digest):
        raise CorruptFile(
            "a malformed checksum", expected=f"{digits} hexadecimal digits", found=repr(tensor.digest[:80])
        )


def _check_files(manifest: SkyRLManifest) -> None:
    _check_unique("payload file", manifest.payload_files)
    _check_unique("payload", (f"{tensor.payload_file}: {tensor.payload_key}" for tensor in manifest.tensors))
    used = {tensor.payload_file for tensor in manifest.tensors}
    for name in manifest.payload_files:
        layout.check_file_name(name)
    if used != set(manifest.payload_files):
        raise CorruptFile(
            "the payload files listed are not those of the tensors",
            expected=", ".join(sorted(used)[:4]) or "none",
            found=", ".join(sorted(manifest.payload_files)[:4]) or "none",
        )


def _check_totals(manifest: SkyRLManifest) -> None:
    for field in ("uncompressed_num_bytes", "compressed_num_bytes"):
        expected = sum(getattr(tensor, field) for tensor in manifest.tensors)
        found = getattr(manifest, f"total_{field}")
        if found != expected:
            raise CorruptFile(f"total_{field} is not the sum over tensors", expected=expected, found=found)
