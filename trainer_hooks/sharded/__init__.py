# SPDX-License-Identifier: Apache-2.0
"""Models that several processes hold together: each rank publishes its own part, and no weight travels between them.

The way of the data: `module` or `source` say what a rank holds, by way of `plan` (names) and `places` (positions);
`owners` decides who publishes what; `differ` compares it with the `baseline`; `writing` writes the parts and the table;
`ranks` is how all agree; `opening` finds the way back after a restart; `publisher` ties these together.
"""

from trainer_hooks.sharded.publisher import ShardedPublisher
from trainer_hooks.sharded.source import PartialTensor, Segment, Shard, ShardPlan, ShardRead, ShardSource

__all__ = ["PartialTensor", "Segment", "Shard", "ShardPlan", "ShardRead", "ShardSource", "ShardedPublisher"]
