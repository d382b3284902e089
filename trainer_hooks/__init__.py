# SPDX-License-Identifier: Apache-2.0
"""The trainer's side: diff the weights after a step and publish what changed. Works with no vLLM installed.

::

    publisher = DeltaPublisher(model, sync_dir="/shared/run-1", base="/models/base")
    ...
    optimizer.step()
    publisher.publish()

The way of the data: `source` names the tensors or shards, `compare` finds what differs from the baseline, `publication`
writes and commits it behind the step, and finds the way back after a restart. `publisher` ties these together,
`sharded_publisher` for a model that several processes hold, which agree by `ranks`.
"""

from trainer_hooks.compare.audit import AuditReport
from trainer_hooks.publication.metrics import PublishMetrics
from trainer_hooks.publication.observers import PublishObserver
from trainer_hooks.publication.trackers import TensorBoardObserver, WandbObserver
from trainer_hooks.publisher import DeltaPublisher, Publication, PublishReport
from trainer_hooks.sharded_publisher import ShardedPublisher
from trainer_hooks.source import IterableSource, ModuleSource, ParameterSource, SourceItem
from trainer_hooks.source.shards import PartialTensor, ShardSource
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
