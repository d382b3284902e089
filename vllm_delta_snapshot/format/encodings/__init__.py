# SPDX-License-Identifier: Apache-2.0
"""How changes become arrays in a container: small interchangeable classes, all with the contract of `base`."""

from __future__ import annotations

from typing import Final

from vllm_delta_snapshot.errors import UnsupportedFormat
from vllm_delta_snapshot.format.encodings.base import Encoding
from vllm_delta_snapshot.format.encodings.compact import Compact
from vllm_delta_snapshot.format.encodings.positions import All, Bitmap, Gaps
from vllm_delta_snapshot.format.encodings.raw import Raw, RawDifference
from vllm_delta_snapshot.format.encodings.values import Planes, Signs

__all__ = ["ENCODINGS", "Encoding", "encoding_of"]

_ALL: Final[tuple[Encoding, ...]] = (
    Raw(),
    RawDifference(),
    Compact("packed", Gaps(), Planes()),
    Compact("bitmap", Bitmap(), Planes()),
    Compact("dense", All(), Planes()),
    Compact("difference", Gaps(), Signs()),
    Compact("bitmap_difference", Bitmap(), Signs()),
    Compact("dense_difference", All(), Signs()),
)

ENCODINGS: Final[dict[str, Encoding]] = {encoding.name: encoding for encoding in _ALL}
"""Every encoding this reader knows, by its name in metadata."""


def encoding_of(name: str) -> Encoding:
    """Return the encoding of this name.

    Raises:
        UnsupportedFormat: this reader does not know it.
    """
    try:
        return ENCODINGS[name]
    except KeyError:
        raise UnsupportedFormat(
            "unknown encoding", expected=" ".join(ENCODINGS), found=name, hint="Update vllm-delta-snapshot."
        ) from None
