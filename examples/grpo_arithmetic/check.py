# SPDX-License-Identifier: Apache-2.0
"""The final comparison: are the live server's weights the trainer's, bit for bit, and does it speak as they do?

Three independent witnesses: the trainer's own tensors, digested here as vLLM digests its parameters; the materialized
checkpoint; and a fresh server that never saw a delta and loaded that checkpoint.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from trainer_hooks import ModuleSource
from vllm_delta_snapshot.checkpoint import Checkpoint

EMPTY = hashlib.sha256(b"").hexdigest()
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Parameters that vLLM fuses by stacking rows: their bytes are those of the parts, one after the other."""
VOCABULARY_PADDING = 64
"""vLLM pads embeddings to a multiple of this; padded ones have no bytes to compare with."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a server says about its weights."""

    checksums: Mapping[str, str]
    tokens: Sequence[Sequence[int]]


@dataclass(slots=True)
class Verdict:
    """What was found.

    Attributes:
        problems: everything that is wrong, for people; weights and tokens apart.
        compared: vLLM parameters compared with the trainer's tensors directly.
        parameters: vLLM parameters in all.
    """

    weight_problems: list[str] = field(default_factory=list)
    token_problems: list[str] = field(default_factory=list)
    compared: int = 0
    parameters: int = 0


def served_tensors(model: nn.Module, base: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the trainer's weights by checkpoint name, cast to the serving dtype of the base."""
    specs = Checkpoint(base).specs
    for item in ModuleSource(model).items(specs):
        for name, tensor in item.load():
            yield name, tensor.detach().to(getattr(torch, specs[name].element.torch_name)).contiguous()


def compare_checkpoint(trainer: Mapping[str, torch.Tensor], folder: Path) -> list[str]:
    """Compare a checkpoint's files with the trainer's tensors, bit for bit; return the differences.

    Reads with the safetensors library, not with this project's reader.
    """
    problems, seen = [], set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                seen.add(name)
                tensor = file.get_tensor(name)
                if name not in trainer:
                    problems.append(f"{name}: only in {folder.name}")
                elif not _is_equal(tensor, trainer[name]):
                    problems.append(f"{name}: {folder.name} differs from the trainer")
    return problems + [f"{name}: missing in {folder.name}" for name in trainer if name not in seen]


def judge(trainer: Mapping[str, torch.Tensor], base: ServerState, live: ServerState, fresh: ServerState) -> Verdict:
    """Compare the live server with the trainer and with a fresh server; `base` is the server before training."""
    verdict = Verdict(parameters=len(live.checksums))
    problems = verdict.weight_problems
    problems += _meaningless(base, live)
    names = live.checksums.keys() | fresh.checksums.keys()
    problems += [
        f"{name}: the live server differs from a fresh one"
        for name in sorted(names)
        if live.checksums.get(name) != fresh.checksums.get(name)
    ]
    covered: set[str] = set()
    for key, digest in live.checksums.items():
        parts = _parts(key, trainer)
        covered.update(parts)
        if not parts or _is_padded(key, trainer[parts[0]]):
            continue
        verdict.compared += 1
        if digest != _sha256([trainer[part] for part in parts]):
            problems.append(f"{key}: the live server differs from the trainer")
    if not verdict.compared:
        problems.append("no parameter of the server could be compared with the trainer's")
    problems += [f"{name}: in no checksum" for name in _uncovered(trainer, covered)]
    for index, (ours, theirs) in enumerate(zip(live.tokens, fresh.tokens, strict=True)):
        if list(ours) != list(theirs):
            verdict.token_problems.append(f"prompt {index}: live {list(ours)}, fresh {list(theirs)}")
    if not any(live.tokens):
        verdict.token_problems.append("no tokens at all")
    return verdict


def _meaningless(base: ServerState, live: ServerState) -> list[str]:
    """Say why checksums prove nothing: taken of nothing, or the same before and after training."""
    problems = [f"{key}: checksum of no bytes" for key, digest in live.checksums.items() if digest == EMPTY]
    if not live.checksums:
        problems.append("the server has no checksums")
    elif dict(base.checksums) == dict(live.checksums):
        problems.append("the checksums are those of the base checkpoint: nothing was updated")
    return problems


def _parts(key: str, trainer: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the checkpoint names whose bytes, in this order, are the vLLM parameter's; nothing if unknown."""
    name = key.rsplit(":", 1)[-1]
    if name in trainer:
        return [name]
    for fused, parts in FUSED.items():
        if re.search(rf"\.{fused}\.", name):
            names = [name.replace(fused, part) for part in parts]
            return names if all(part in trainer for part in names) else []
    return []


def _uncovered(trainer: Mapping[str, torch.Tensor], covered: set[str]) -> list[str]:
    """Return the tensors of the trainer that no checksum covers.

    A tied twin of a covered one needs none. Experts are fused in ways that are not followed here; the comparison with
    the fresh server covers them.
    """
    names = [name for name in trainer if name not in covered and ".experts." not in name]
    return [name for name in names if not any(_is_equal(trainer[name], trainer[other]) for other in covered)]


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _is_padded(key: str, tensor: torch.Tensor) -> bool:
    is_vocabulary = "embed_tokens" in key or "lm_head" in key
    return is_vocabulary and tensor.shape[0] % VOCABULARY_PADDING != 0


def _sha256(tensors: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_bits(tensor).numpy())
    return digest.hexdigest()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
