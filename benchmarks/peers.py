# SPDX-License-Identifier: Apache-2.0
"""How others write a step's changes, in our own words: what they send, and what it takes to apply it.

Each class turns weights before and after into payloads, one a tensor, and applies payloads to weights in place. They
are written as fast as their format allows with torch, numpy and zstd, and checked bit for bit like ours.

| class | after | a changed bf16 weight |
|---|---|---|
| `OpenRL` | sparse_delta v2: `ne`, `nonzero`, int32 positions, absolute values | 6 bytes |
| `SkyRL` | the XOR of a whole tensor's bytes, zstd level 1 | by how much zstd finds |
| `NemoRL` | gaps in the smallest of uint16, 32, 64, the XOR of the values, one zstd level 1 | by how much zstd finds |
| `TRL` | gaps as uint16 (uint32 for a tensor that needs it), absolute values | 4 bytes |
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from vllm_delta_snapshot.dtypes import Bits

__all__ = ["PEERS", "Payload", "Peer"]

Payload = dict[str, tuple[Any, ...]]
"""By tensor, what is sent of it: bytes and arrays."""


class Peer(Protocol):
    """One way to send changes."""

    name: str

    def encode(self, before: dict[str, Bits], after: dict[str, Bits]) -> Payload:
        """Return what is sent."""
        ...

    def apply(self, payload: Payload, weights: dict[str, Bits]) -> None:
        """Change weights in place."""
        ...


class OpenRL:
    """See the module."""

    name = "OpenRL v2"

    def encode(self, before: dict[str, Bits], after: dict[str, Bits]) -> Payload:
        """See `Peer`."""
        payload: Payload = {}
        for name, new in after.items():
            old, now = _torch(before[name]), _torch(new)
            positions = torch.ne(old, now).nonzero().flatten()
            if positions.numel():
                payload[name] = (positions.to(torch.int32).numpy(), now[positions].numpy())
        return payload

    def apply(self, payload: Payload, weights: dict[str, Bits]) -> None:
        """See `Peer`."""
        for name, (positions, values) in payload.items():
            _torch(weights[name]).index_copy_(0, torch.from_numpy(positions).long(), torch.from_numpy(values))


class SkyRL:
    """See the module."""

    name = "XOR + zstd (SkyRL)"

    def encode(self, before: dict[str, Bits], after: dict[str, Bits]) -> Payload:
        """See `Peer`."""
        compressor = zstandard.ZstdCompressor(level=1)
        payload: Payload = {}
        for name, new in after.items():
            changed = np.bitwise_xor(before[name], new)
            if changed.any():
                payload[name] = (compressor.compress(changed.data),)
        return payload

    def apply(self, payload: Payload, weights: dict[str, Bits]) -> None:
        """See `Peer`."""
        decompressor = zstandard.ZstdDecompressor()
        for name, (data,) in payload.items():
            weights[name] ^= np.frombuffer(decompressor.decompress(data), weights[name].dtype)


class NemoRL:
    """See the module."""

    name = "gaps + XOR + zstd (NeMo RL)"

    def encode(self, before: dict[str, Bits], after: dict[str, Bits]) -> Payload:
        """See `Peer`."""
        compressor = zstandard.ZstdCompressor(level=1)
        payload: Payload = {}
        for name, new in after.items():
            positions = np.flatnonzero(before[name] != new)
            if positions.size:
                gaps = _gaps(positions)
                values = before[name][positions] ^ new[positions]
                body = np.array([gaps.itemsize, gaps.size], "<u8").tobytes() + gaps.tobytes() + values.tobytes()
                payload[name] = (compressor.compress(body),)
        return payload

    def apply(self, payload: Payload, weights: dict[str, Bits]) -> None:
        """See `Peer`."""
        decompressor = zstandard.ZstdDecompressor()
        for name, (data,) in payload.items():
            body = decompressor.decompress(data)
            itemsize, count = (int(number) for number in np.frombuffer(body, "<u8", 2))
            gaps = np.frombuffer(body, f"<u{itemsize}", count, 16)
            values = np.frombuffer(body, weights[name].dtype, count, 16 + itemsize * count)
            weights[name][_positions(gaps)] ^= values


class TRL:
    """See the module."""

    name = "gaps, raw (TRL)"

    def encode(self, before: dict[str, Bits], after: dict[str, Bits]) -> Payload:
        """See `Peer`."""
        payload: Payload = {}
        for name, new in after.items():
            positions = np.flatnonzero(before[name] != new)
            if positions.size:
                payload[name] = (_gaps(positions), new[positions])
        return payload

    def apply(self, payload: Payload, weights: dict[str, Bits]) -> None:
        """See `Peer`."""
        for name, (gaps, values) in payload.items():
            weights[name][_positions(gaps)] = values


PEERS: tuple[Peer, ...] = (OpenRL(), TRL(), SkyRL(), NemoRL())


def _torch(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16))


def _gaps(positions: NDArray[Any]) -> NDArray[Any]:
    gaps = np.diff(positions, prepend=-1) - 1
    most = int(gaps.max())
    return gaps.astype("<u2" if most < 1 << 16 else "<u4" if most < 1 << 32 else "<u8")


def _positions(gaps: NDArray[Any]) -> NDArray[Any]:
    return np.cumsum(gaps.astype(np.int64) + 1) - 1
