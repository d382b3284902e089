# SPDX-License-Identifier: Apache-2.0
"""How one tensor's patch becomes arrays in a container: one class a file, all with the contract of `base`."""

from __future__ import annotations

from typing import Final

from vllm_delta_snapshot.errors import UnsupportedFormat
from vllm_delta_snapshot.format.encodings.base import Encoding
from vllm_delta_snapshot.format.encodings.raw import Raw

__all__ = ["ENCODINGS", "Encoding", "encoding_of"]

ENCODINGS: Final[dict[str, Encoding]] = {encoding.name: encoding for encoding in (Raw(),)}
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
