# SPDX-License-Identifier: Apache-2.0
"""Verify: the values about to be overwritten, and the values after, compared with what the trainer published."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_delta_snapshot.engine.live import MappedPatch
from vllm_delta_snapshot.errors import BaseMismatch, VerifyError
from vllm_delta_snapshot.format.digest import format_digest

__all__ = ["verify_new", "verify_old"]


def verify_old(mapped: MappedPatch, old: Sequence[torch.Tensor], expected: str) -> bool:
    """Compare the values about to be overwritten with those that the trainer's delta starts from.

    Args:
        mapped: the patch.
        old: its gathered values.
        expected: the digest in metadata.

    Returns:
        Whether it could be compared: a worker that holds a part of the touched elements cannot.

    Raises:
        BaseMismatch: the live weights have drifted from the published ones.
    """
    digest = mapped.digest_of(old)
    if digest is None:
        return False
    if format_digest(digest) != expected:
        raise BaseMismatch(
            "live weights are not the ones this delta was made against; they were changed by something else",
            tensor=mapped.patch.spec.name,
            expected=f"digest {expected}",
            found=f"digest {format_digest(digest)}",
            hint="Restart the engine from the base checkpoint; it catches up by itself.",
        )
    return True


def verify_new(mapped: Sequence[MappedPatch]) -> None:
    """Read back every written element.

    Raises:
        VerifyError: an element does not have the published bits.
    """
    for item in mapped:
        if not item.matches():
            raise VerifyError(
                "a weight does not have the published bits after it was written",
                tensor=item.patch.spec.name,
            )
