"""Checkpoint folders, written by the safetensors library and by nothing of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.tensors import random_bits, to_torch
from vllm_delta_snapshot.types import TensorSpec

TINY_SPECS = (
    TensorSpec("model.embed.weight", (13, 8), "BF16"),
    TensorSpec("model.layers.0.attn.weight", (8, 8), "BF16"),
    TensorSpec("model.layers.0.attn.bias", (8,), "F16"),
    TensorSpec("model.layers.0.fp8.weight", (5, 7), "F8_E4M3"),
    TensorSpec("model.layers.0.step", (), "I64"),
    TensorSpec("model.layers.0.void", (0, 4), "BF16"),
    TensorSpec("model.norm.weight", (8,), "F32"),
)
"""Several types, a scalar, an empty tensor."""


def tiny_tensors(seed: object = 0) -> dict[str, torch.Tensor]:
    """Return tensors of `TINY_SPECS` with random bits."""
    return {spec.name: to_torch(random_bits(spec.dtype, spec.numel, spec.name, seed), spec) for spec in TINY_SPECS}


def write_checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor], *, shards: int = 1) -> Path:
    """Write a checkpoint folder with a config and a tokenizer file; with an index if there are several shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "tiny"}\n')
    (folder / "tokenizer.json").write_text('{"tokens": ["a", "b"]}\n')
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def snapshot_of(folder: Path) -> dict[str, bytes]:
    """Return every file under a folder, by its path, for "nothing was touched"."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
