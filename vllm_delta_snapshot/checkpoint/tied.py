# SPDX-License-Identifier: Apache-2.0
"""Tied embeddings that a checkpoint stores twice: input embedding and output head under both names.

Loaders differ in which of the two they take, transformers even by whether they are equal; so both have to be the same
bits in every version, or nobody knows which model it is. What `config.json` says counts, and names by convention; of a
checkpoint that says nothing, nothing is assumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import DeltaSnapshotError
from vllm_delta_snapshot.types import TensorSpec
from vllm_delta_snapshot.util.regular_file import read_bounded

__all__ = ["Tie", "are_same", "counterpart_of", "role_of", "says_tied", "tie_of"]

Role = Literal["embedding", "head"]

_ROLES: Final[Mapping[str, Role]] = {
    **dict.fromkeys(("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embed"), "embedding"),
    **dict.fromkeys(("lm_head", "embed_out", "output_layer", "output", "head"), "head"),
}
_MAX_CONFIG_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Tie:
    """Input embedding and output head that a checkpoint stores both, and says to be one.

    Attributes:
        embedding: the embedding's name.
        head: the head's.
        are_equal: whether the two are stored with the same bits.
    """

    embedding: str
    head: str
    are_equal: bool

    @property
    def names(self) -> tuple[str, str]:
        """Both names."""
        return self.embedding, self.head

    def other(self, name: str) -> str:
        """Return the name of the other one."""
        return self.head if name == self.embedding else self.embedding


def tie_of(checkpoint: Checkpoint) -> Tie | None:
    """Return the tied weights that a checkpoint stores twice, if it does. Reads these two tensors."""
    if not says_tied(checkpoint.folder):
        return None
    for head in (name for name in checkpoint.specs if role_of(name) == "head"):
        embedding = counterpart_of(head, checkpoint.specs)
        if embedding is not None and checkpoint.specs[embedding].shape == checkpoint.specs[head].shape:
            return Tie(embedding, head, are_same(checkpoint, embedding, head))
    return None


def says_tied(folder: Path) -> bool | None:
    """Return what a checkpoint's config.json says of tied embeddings; ``None`` if nothing, or one thing and another."""
    try:
        config = json.loads(read_bounded(folder / "config.json", _MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError, DeltaSnapshotError):
        return None
    said = set(_said(config))
    return said.pop() if len(said) == 1 else None


def role_of(name: str) -> Role | None:
    """Return what a tensor is by its name; ``None`` for others, and for what belongs to a layer or a draft head."""
    *path, leaf = name.split(".")
    if leaf != "weight" or not path or any(part.isdecimal() or "mtp" in part for part in path):
        return None
    return _ROLES.get(path[-1])


def counterpart_of(name: str, names: Iterable[str]) -> str | None:
    """Return the embedding of a head, or the head of an embedding; ``None`` if there is none, or several."""
    wanted = {"head": "embedding", "embedding": "head"}.get(role_of(name) or "")
    if wanted is None:
        return None
    found = [other for other in names if role_of(other) == wanted]
    return found[0] if len(found) == 1 else None


def are_same(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Say whether two tensors of a checkpoint have the same shape, type and bits."""
    a, b = checkpoint.specs[one], checkpoint.specs[other]
    return _form(a) == _form(b) and np.array_equal(checkpoint.bits(one), checkpoint.bits(other))


def _form(spec: TensorSpec) -> tuple[object, ...]:
    return spec.shape, spec.dtype


def _said(config: Any) -> Iterator[bool]:
    """Yield what a configuration says, and what the configurations in it do: those of a multimodal model's parts."""
    if not isinstance(config, dict):
        return
    for part in (config, *config.values()):
        said = part.get("tie_word_embeddings") if isinstance(part, dict) else None
        if isinstance(said, bool):
            yield said
