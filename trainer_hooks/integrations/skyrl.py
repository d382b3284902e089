# SPDX-License-Identifier: Apache-2.0
"""SkyRL 0.4: its setting ``weight_sync_backend="delta"`` is served by this project instead of by SkyRL's own deltas.

SkyRL has no setting for another backend, but it takes its engines from vLLM's factories under the names "delta" on both
sides. `use_delta_snapshot` puts ours there. Call it in every process that SkyRL starts servers from or trains in; the
example shows where. What SkyRL is configured with stays: ``delta_weight_sync.sync_dir`` is the run's folder.

SkyRL 0.3 had a sender interface of its own; there is no adapter for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl.backends.skyrl_train import weight_sync
from skyrl.backends.skyrl_train.weight_sync.weight_senders import SkyrlTrainerCapabilities

from trainer_hooks.integrations.handshake import ClientFleet
from trainer_hooks.integrations.vllm import (
    BACKEND,
    DeltaSnapshotTrainerEngine,
    DeltaSnapshotTrainerInitInfo,
    load_general_plugins,
    register,
)
from vllm_delta_snapshot.errors import SourceError

__all__ = ["SkyrlDeltaSnapshotEngine", "use_delta_snapshot"]

_SKYRL_NAME = "delta"


class SkyrlDeltaSnapshotEngine(SkyrlTrainerCapabilities, DeltaSnapshotTrainerEngine):
    """Our trainer engine, as SkyRL's workers use one."""

    publisher: ClassVar[Mapping[str, Any]] = {}

    # SkyRL must not reset the prefix cache beside it: that belongs inside the pause.
    skyrl_handles_prefix_cache_reset = True

    @classmethod
    def translate(cls, init_info: Any) -> DeltaSnapshotTrainerInitInfo:
        """Return SkyRL's `DeltaTrainerInitInfo` as ours. Its local folders and loaders are not needed."""
        return DeltaSnapshotTrainerInitInfo(
            sync_dir=init_info.sync_dir,
            base=init_info.base_model_path,
            rank=init_info.rank,
            publisher=dict(cls.publisher),
        )

    def skyrl_set_reset_prefix_cache(self, reset: bool) -> None:
        """Take SkyRL's word on whether the next round resets the prefix cache."""
        if isinstance(self._fleet, ClientFleet):
            self._fleet.is_cache_reset = reset

    def send_weights(self) -> None:
        """Publish, and bring the servers there. Blocks; called on every rank.

        Raises:
            SourceError: SkyRL trains a draft model, which this backend does not update.
            DeltaSnapshotError: see `Rounds.publish`.
        """
        if self.skyrl_draft_source is not None:
            raise SourceError("speculative decoding's draft model would keep its old weights", hint="Turn it off.")
        super().send_weights()


def use_delta_snapshot(**publisher: Any) -> None:
    """Have this process's SkyRL use the `delta_snapshot` backend where it is told to use "delta". May be repeated.

    Args:
        publisher: further arguments of `DeltaPublisher`, such as `unsourced`; SkyRL's configuration has none for them.
    """
    SkyrlDeltaSnapshotEngine.publisher = publisher
    load_general_plugins()  # the driver checks that vLLM knows the servers' backend
    weight_sync._VLLM_RECEIVE_BACKENDS[_SKYRL_NAME] = BACKEND
    register(_SKYRL_NAME, SkyrlDeltaSnapshotEngine)
