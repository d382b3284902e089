# SPDX-License-Identifier: Apache-2.0
"""Fit: whether what a trainer has is what the base checkpoint has. By names, shapes and dtypes.

No weight is read, but for those that the base says to be tied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import torch

from trainer_hooks.source import SourceItem
from trainer_hooks.source.castable import check_dtype
from trainer_hooks.source.unsourced import Unsourced, find_unsourced, stranger_of
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["check_fit", "check_names", "misfit_of"]

_LISTED: Final = 8
_HINT: Final = "Publish by checkpoint names: every tensor of the base, each once."


def check_fit(
    items: Iterable[SourceItem], base: Checkpoint, base_model: str, patterns: Collection[str] = ()
) -> Unsourced:
    """Check that a source has every tensor of the base checkpoint, once, and where it tells their forms, as they are.

    Args:
        items: a pass over the source; nothing of it is loaded.
        base: the base checkpoint.
        base_model: what the user calls it, for messages.
        patterns: which tensors it need not have (`trainer_hooks.source.unsourced`).

    Returns:
        What becomes of those that it has not.

    Raises:
        SourceError: it has not; names the tensors.
    """
    specs = base.specs
    seen: list[str] = []
    misfits: list[str] = []
    for item in items:
        seen += item.names
        for name, (shape, dtype) in zip(item.names, item.forms, strict=bool(item.forms)):
            if name in specs and (misfit := misfit_of(specs[name], shape, dtype)):
                misfits.append(misfit)
    counts = Counter(seen)
    unsourced = find_unsourced(counts.keys() & specs.keys(), base, patterns)
    others = [stranger_of(name, base) for name in counts if name not in specs]
    others += [*_doubled(counts), *misfits]
    # Where names do not fit at all, it is not that tensors need not be there.
    _refuse([*unsourced.refused, *others], base_model, hint=_HINT if others else unsourced.hint)
    return unsourced


def check_names(seen: Iterable[str], specs: Mapping[str, TensorSpec], base_model: str) -> None:
    """Check that a pass had every tensor of the base checkpoint, once.

    Raises:
        SourceError: it had not; names the tensors.
    """
    counts = Counter(seen)
    problems = [f"{name} is missing" for name in specs if name not in counts]
    problems += [f"{name} is not in the base checkpoint" for name in counts if name not in specs]
    _refuse([*problems, *_doubled(counts)], base_model)


def misfit_of(spec: TensorSpec, shape: tuple[int, ...] | None, dtype: torch.dtype) -> str | None:
    """Return how a trainer's tensor does not fit the checkpoint's, or ``None``.

    Args:
        spec: the checkpoint's.
        shape: the trainer's full shape; ``None`` if it is known to fit.
        dtype: the trainer's dtype.
    """
    if shape is not None and tuple(shape) != spec.shape:
        return f"{spec.name} is {spec} in the base checkpoint, but has the shape {list(shape)} here"
    try:
        check_dtype(spec, dtype)
    except SourceError:
        return f"{spec.name} is {spec} in the base checkpoint, and {dtype} cannot be rounded to that"
    return None


def _doubled(counts: Mapping[str, int]) -> list[str]:
    return [f"{name} comes {count} times" for name, count in counts.items() if count > 1]


def _refuse(problems: list[str], base_model: str, hint: str = _HINT) -> None:
    if problems:
        more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise SourceError(
            "the tensors are not those of the base checkpoint",
            file=base_model,
            found="; ".join(problems[:_LISTED]) + more,
            hint=hint,
        )
