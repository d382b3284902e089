"""What a server's live weights must be, computed from the trainer's tensors alone: nothing of the product is used here.

vLLM's Qwen3 holds q, k and v, and gate and up, in one parameter each, one below the other; all else as it is.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file

_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def live_digests(state: Path) -> dict[str, str]:
    """Return the SHA-256 of the bytes of each parameter that a server with the weights in this file holds."""
    tensors = load_file(state)
    for layer in sorted({name.partition(".self_attn.")[0] for name in tensors if ".self_attn." in name}):
        for fused, parts in _FUSED.items():
            tensors[f"{layer}.{fused}.weight"] = torch.cat([tensors.pop(f"{layer}.{part}.weight") for part in parts])
    return {name: _sha256(tensor) for name, tensor in tensors.items()}


def differing(expected: dict[str, str], live: dict[str, str]) -> list[str]:
    """Return the parameters that are not as they must be, and those that only one side has."""
    return sorted(name for name in expected.keys() | live.keys() if expected.get(name) != live.get(name))


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
