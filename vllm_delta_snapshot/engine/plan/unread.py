# SPDX-License-Identifier: Apache-2.0
"""Tensors of the checkpoint that the model's loader never reads: draft heads, `inv_freq`, the copy of a tied head.

An engine that leaves them out is the one that a fresh server on the same version would be. Invariant: that is said only
of what every worker has proven to be unread (`recorder.StandIns.unread`), that no draft model may have read instead,
and, for the head of a model that takes its embedding for it, that no version can have another value than the embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.checkpoint.tied import counterpart_of, role_of, tie_of
from vllm_delta_snapshot.engine.plan.load_plan import PlanSummary
from vllm_delta_snapshot.engine.ways import Choice

__all__ = ["choose_unread", "unread_by_all"]

_WITHOUT_MODEL: Final = ("ngram", "ngram_gpu", "suffix")


def unread_by_all(summaries: Sequence[PlanSummary]) -> frozenset[str]:
    """Return what no worker's loader reads, nor hands to a layer that is reloaded, where loading is only watched."""
    used = frozenset().union(*(name for summary in summaries for name in (summary.problems, summary.reloads)))
    return frozenset.intersection(*(summary.unread for summary in summaries)) - used


def choose_unread(names: Iterable[str], checkpoint: Checkpoint, config: Any) -> dict[str, Choice]:
    """Choose for tensors that no worker's loader reads: `unread`, or `refused`. Reads tied weights of the checkpoint.

    Args:
        names: these tensors.
        checkpoint: the checkpoint that the engine was loaded from.
        config: vLLM's configuration of the engine.
    """
    names = list(names)
    if names and _has_draft_model(config):
        reason = "the model never reads it, but its draft model may, and updates do not reach that"
        return {name: Choice("refused", reason) for name in names}
    return {name: _of_head(name, checkpoint) or Choice("unread", "the model's loader never reads it") for name in names}


def _of_head(name: str, checkpoint: Checkpoint) -> Choice | None:
    """Choose for a head, or an embedding, whose counterpart the model takes for both; ``None`` for anything else."""
    other = counterpart_of(name, checkpoint.specs) if role_of(name) is not None else None
    if other is None:
        return None
    tie = tie_of(checkpoint)
    if tie is None or name not in tie.names:
        return Choice(
            "refused",
            f"the model never reads it and takes {other} for it, but config.json does not say that the two are tied, "
            "so trainers may make them differ",
        )
    if not tie.are_equal:
        return Choice(
            "refused",
            f"the model never reads it and takes {other} for it, as config.json says that the two are tied, but the "
            "checkpoint stores two that differ",
        )
    return Choice("unread", f"a copy of {other}, which the model takes for both")


def _has_draft_model(config: Any) -> bool:
    speculative = getattr(config, "speculative_config", None)
    return speculative is not None and getattr(speculative, "method", None) not in _WITHOUT_MODEL
