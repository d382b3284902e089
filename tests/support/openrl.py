"""OpenRL's sparse_delta version 2, from its description: a writer by the safetensors library, and its reader's rules.

Nothing of ours is used here, so that it can judge what we write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Change = tuple[list[int], torch.Tensor, list[int]]
"""Positions, new values, and the shape of the whole tensor."""


def write_openrl_delta(folder: Path, changes: Mapping[str, Change], **more: Any) -> Path:
    """Write a delta folder as OpenRL's exporter does."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = {}
    for i, (positions, values, _) in enumerate(changes.values()):
        packed[f"{i}.indices"] = torch.tensor(positions, dtype=torch.int32)
        packed[f"{i}.values"] = values
    names = list(changes)
    save_file(packed, folder / "delta.safetensors", metadata={"layer_names": json.dumps(names)})
    changed = sum(len(positions) for positions, _, _ in changes.values())
    total = sum(torch.Size(shape).numel() for _, _, shape in changes.values())
    metadata = {
        "base_model": "Qwen/Qwen3-0.6B",
        "created_at": "2026-01-02T03:04:05+00:00",
        "format": "sparse_delta",
        "format_version": 2,
        "kind": "sampler",
        "model_id": "session-7",
        "changed_elements": changed,
        "total_elements": total,
        "layer_names": names,
        "layer_shapes": [shape for _, _, shape in changes.values()],
        "density_pct": round(100 * changed / max(1, total), 3),
        "timestamp": 1767323045.25,
    }
    (folder / "metadata.json").write_text(json.dumps(metadata | more))
    return folder


def check_openrl_delta(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Check a folder as OpenRL's reader does; return positions and values by name. Raises AssertionError."""
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["format"] == "sparse_delta"
    assert type(metadata["format_version"]) is int
    assert metadata["format_version"] == 2
    _check_fields(metadata)
    names, shapes = metadata["layer_names"], metadata["layer_shapes"]
    assert [path.name for path in folder.glob("*.safetensors")] == ["delta.safetensors"]
    tensors = load_file(folder / "delta.safetensors")
    with safe_open(folder / "delta.safetensors", "pt") as file:
        assert json.loads(file.metadata()["layer_names"]) == names
    assert set(tensors) == {f"{i}.{part}" for i in range(len(names)) for part in ("indices", "values")}
    layers = {}
    for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        layers[name] = _checked_layer(tensors[f"{i}.indices"], tensors[f"{i}.values"], shape)
    assert metadata["changed_elements"] == sum(indices.numel() for indices, _ in layers.values())
    return layers


def _check_fields(metadata: dict[str, Any]) -> None:
    names, shapes = metadata["layer_names"], metadata["layer_shapes"]
    assert isinstance(names, list)
    assert all(isinstance(name, str) and name for name in names)
    assert len(set(names)) == len(names)
    assert isinstance(shapes, list)
    assert len(shapes) == len(names)
    assert all(type(size) is int and size >= 0 for shape in shapes for size in shape)
    assert all(type(metadata[key]) is int for key in ("changed_elements", "total_elements"))
    assert metadata["base_model"] is None or isinstance(metadata["base_model"], str)
    assert metadata["model_id"] is None or isinstance(metadata["model_id"], str)
    assert all(isinstance(metadata[key], str) for key in ("created_at", "kind"))
    assert isinstance(metadata["timestamp"], float)
    density = 100 * metadata["changed_elements"] / max(1, metadata["total_elements"])
    assert metadata["density_pct"] == round(density, 3)


def _checked_layer(indices: torch.Tensor, values: torch.Tensor, shape: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    numel = torch.Size(shape).numel()
    assert indices.dtype == (torch.int32 if numel <= 2**31 else torch.int64)
    assert indices.dim() == values.dim() == 1
    assert indices.numel() == values.numel() > 0
    assert values.dtype.is_floating_point
    assert bool((indices[1:] > indices[:-1]).all())
    assert int(indices[0]) >= 0
    assert int(indices[-1]) < numel
    return indices, values
