# SPDX-License-Identifier: Apache-2.0
"""The trainer's side: diff the weights after a step and publish what changed. Works with no vLLM installed.

::

    publisher = DeltaPublisher(model, sync_dir="/shared/run-1", base="/models/base")
    ...
    optimizer.step()
    publisher.publish()

The way of the data: `source` names the tensors, `diff` compares them with the `baseline`, `publish` writes and
commits, `publisher` ties these together, `resume` finds the way back after a restart. `sharded` does the same for a
model that several processes hold together.
"""

from trainer_hooks.audit import AuditReport
from trainer_hooks.metrics import PublishMetrics
from trainer_hooks.observers import PublishObserver
from trainer_hooks.publisher import DeltaPublisher, Publication, PublishReport
from trainer_hooks.sharded import PartialTensor, ShardedPublisher, ShardSource
from trainer_hooks.source import IterableSource, ModuleSource, ParameterSource, SourceItem
from trainer_hooks.trackers import TensorBoardObserver, WandbObserver
from vllm_delta_snapshot.upkeep import UpkeepPolicy

__all__ = [
    "AuditReport",
    "DeltaPublisher",
    "IterableSource",
    "ModuleSource",
    "ParameterSource",
    "PartialTensor",
    "Publication",
    "PublishMetrics",
    "PublishObserver",
    "PublishReport",
    "ShardSource",
    "ShardedPublisher",
    "SourceItem",
    "TensorBoardObserver",
    "UpkeepPolicy",
    "WandbObserver",
]
