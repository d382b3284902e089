# SPDX-License-Identifier: Apache-2.0
"""Exact sparse weight deltas for running vLLM engines: the format, the store and the receiving side.

The way of the data, and where to read it::

    trainer_hooks.compare      diff: which elements changed, bit for bit
    format.container           encode: patches -> safetensors files
    trainer_hooks.publication  publish: files, metadata.json, then versions/N.json, created exclusively
    runs.fetch                 fetch: store -> local files, size and checksum compared
    changes.decode             decode: files -> patches, every position checked
    changes.merge              merge: several versions -> one update
    host.stager                stage: the process that does the three above while generation goes on
    engine.write.apply         apply: the only work inside the pause
    engine.write.verify        verify: live weights against what was staged

Importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_delta_snapshot._version import __version__
from vllm_delta_snapshot.errors import DeltaSnapshotError

if TYPE_CHECKING:
    from vllm_delta_snapshot.types import TensorPatch, TensorSpec

__all__ = ["DeltaSnapshotError", "TensorPatch", "TensorSpec", "__version__"]


def __getattr__(name: str) -> object:
    # numpy comes with the types, and takes longer to import than all else that `delta-snapshot --help` needs.
    if name in ("TensorPatch", "TensorSpec"):
        from vllm_delta_snapshot import types

        return getattr(types, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
