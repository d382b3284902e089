# SPDX-License-Identifier: Apache-2.0
"""What all JSON objects of the format have in common: strictness, and errors that name the file and the field."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_delta_snapshot.dtypes import dtype_of
from vllm_delta_snapshot.errors import CorruptFile, LimitExceeded, UnsupportedFormat
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["Count", "Digest64", "Digest128", "PublicationId", "SpecEntry", "WireModel", "parse_json", "unique_pairs"]

Digest64 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
"""A tensor or state digest: 16 hexadecimal digits."""
Digest128 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""The xxh3-128 of a file: 32 hexadecimal digits."""
PublicationId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""Random, new for every attempt to publish."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of elements or bytes."""
Name = Annotated[str, Field(min_length=1, max_length=4096)]
"""A tensor's checkpoint name."""

_IDENTITY: Final = frozenset({"format", "format_version", "digest_algorithm"})
"""Fields that say what an object is and how to read it."""


_DENSE_BYTES: Final = 1 << 20
_BYTES_OF_VALUE: Final = 6


class WireModel(BaseModel):
    """Base of every JSON object this project writes: immutable, typed strictly, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def to_json(self) -> bytes:
        """Return the object as UTF-8 JSON, indented for people, fields in the order of the class."""
        return self.model_dump_json(indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, *, file: str) -> Self:
        """Parse and check.

        Args:
            data: the bytes of the object.
            file: its key or path, for messages.

        Raises:
            UnsupportedFormat: ``format`` or ``format_version`` is one this reader does not know.
            CorruptFile: not JSON, or a field is missing, unknown, of a wrong type or there twice.
            LimitExceeded: more values than so many bytes should hold.
        """
        found = cls.validated(data, file=file)
        parse_json(data, file=file)  # the model takes the last of two fields with one name
        return found

    @classmethod
    def validated(cls, data: bytes, *, file: str) -> Self:
        """Parse what `parse_json` has accepted. See `from_json`."""
        _check_density(data, file)
        try:
            # JSON mode: strict types, but arrays may fill tuples.
            found = cls.model_validate_json(data)
        except ValidationError as error:
            raise _readable(error, file) from error
        # The defaults of these are for writers: what does not say what it is, is not read.
        unsaid = sorted(_IDENTITY & cls.model_fields.keys() - found.model_fields_set)
        if unsaid:
            raise UnsupportedFormat(f"unknown {unsaid[0]}", file=file, found="nothing")
        return found


def _readable(error: ValidationError, file: str) -> CorruptFile | UnsupportedFormat:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "the whole object"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["loc"] and first["loc"][0] in _IDENTITY:
        return UnsupportedFormat(
            f"unknown {field}",
            file=file,
            expected=first.get("ctx", {}).get("expected"),
            found=repr(first["input"]),
            hint="It was written by a newer version, or by another program.",
        )
    found = "nothing" if first["type"] == "missing" else _short(first["input"])
    return CorruptFile(f"field {field}: {first['msg'].lower()}{more}", file=file, found=found)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_density(data: bytes, file: str) -> None:
    """Refuse what would take far more memory than it has bytes: values of two or three bytes each, by the million."""
    values = data.count(b",") if len(data) > _DENSE_BYTES else 0
    if values > len(data) // _BYTES_OF_VALUE:
        raise LimitExceeded(
            "too many values",
            file=file,
            expected=f"at most {len(data) // _BYTES_OF_VALUE} in {len(data)} bytes",
            found=values,
        )


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dictionary of what `json` found in an object.

    Raises:
        ValueError: a name appears twice, or could be named in no other file.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    for name in result:
        name.encode()  # JSON's escapes can spell half a character
    return result


def parse_json(data: bytes, *, file: str) -> dict[str, Any]:
    """Parse bytes into a JSON object, before it is known which one.

    Raises:
        CorruptFile: not a JSON object, or a name appears twice in one.
        LimitExceeded: more values than so many bytes should hold.
    """
    _check_density(data, file)
    try:
        value = json.loads(data, object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise CorruptFile("not valid JSON", file=file, found=error) from error
    if not isinstance(value, dict):
        raise CorruptFile("not a JSON object", file=file, found=type(value).__name__)
    return value


class SpecEntry(WireModel):
    """A tensor's description on the wire."""

    name: Name
    shape: tuple[Count, ...]
    dtype: str

    def spec(self) -> TensorSpec:
        """Return the description as a value.

        Raises:
            UnsupportedFormat: unknown element type.
            LimitExceeded: more elements than 63 bits count.
        """
        try:
            dtype_of(self.dtype)
        except UnsupportedFormat as error:
            raise UnsupportedFormat(
                error.what, tensor=self.name, expected=error.expected, found=error.found, hint=error.hint
            ) from error
        spec = TensorSpec(self.name, self.shape, self.dtype)
        if spec.num_bytes >= 2**63:
            raise LimitExceeded("tensor too large", tensor=self.name, found=str(spec))
        return spec

    @classmethod
    def of(cls, spec: TensorSpec) -> Self:
        """Describe `spec`."""
        return cls(name=spec.name, shape=spec.shape, dtype=spec.dtype)
