# SPDX-License-Identifier: Apache-2.0
"""What the hooks take: the content of `init_info` and `update_info`, checked when it arrives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from vllm_delta_snapshot.engine.ways import Way
from vllm_delta_snapshot.store.secrets import refuse_credentials

__all__ = ["DeltaSnapshotInitInfo", "DeltaSnapshotUpdateInfo"]

_OF_NO_VERSION = ("check", "prepare_repair", "repair")
_OF_OTHER_RUN = ("prepare_switch", "switch")

Action = Literal[
    "apply", "staged", "prepare", "confirm", "check", "verify", "prepare_repair", "repair", "prepare_switch", "switch"
]


@dataclass
class DeltaSnapshotInitInfo(WeightTransferInitInfo):
    """What `init_transfer_engine` takes.

    Raises:
        ValueError: a value of a wrong type or out of range.
        StoreError: `sync_dir` holds credentials.
    """

    sync_dir: str | None = None
    """The run's folder. Without it the engine follows nothing and takes OpenRL folders by `target_weights_path`."""
    checkpoint: str | None = None
    """The local folder that the engine's weights were loaded from; by default the model's own path."""
    stage_dir: str | None = None
    """A local folder with room for a few updates; by default $DELTA_SNAPSHOT_STAGE_DIR or one in the temp folder."""
    skip: list[str] = field(default_factory=list)
    """Patterns of checkpoint names that this engine rightly has no use for (a draft head, a skipped tower)."""
    apply: Way = "scatter"
    """How weights are written: `scatter`, element by element to their places, or `loader`, vLLM's own way."""
    init_timeout_s: float = 600.0
    """How long the stager may take to read the checkpoint once."""
    stage_timeout_s: float = 60.0
    """How long `update_weights` waits for a version that is not staged, unless it says otherwise."""

    cache_bytes: int = 1 << 36
    """How many bytes of fetched versions the host may keep while an engine lags; what is over is fetched again."""

    def __post_init__(self) -> None:
        _check("cache_bytes", self.cache_bytes, int, optional=False)
        if self.cache_bytes < 1:
            raise ValueError(f"init_info: cache_bytes must be positive, found {self.cache_bytes}")
        for name in ("sync_dir", "checkpoint", "stage_dir"):
            _check(name, getattr(self, name), str, optional=True)
        refuse_credentials(self.sync_dir or "", "sync_dir")
        _check("skip", self.skip, list, optional=False)
        for pattern in self.skip:
            _check("skip", pattern, str, optional=False)
        if self.apply not in ("scatter", "loader"):
            raise ValueError(f"init_info: apply must be scatter or loader, found {self.apply!r}")
        for name in ("init_timeout_s", "stage_timeout_s"):
            _check_seconds(name, getattr(self, name))


@dataclass
class DeltaSnapshotUpdateInfo(WeightTransferUpdateInfo):
    """What `update_weights` takes: a version of the run, or an OpenRL folder.

    Raises:
        ValueError: neither or both, or a value of a wrong type or out of range.
    """

    version: int | None = None
    """The version to go to."""
    run: str | None = None
    """The id of the run whose version it is. Whoever names a version names its run."""
    digest: str | None = None
    """The state digest of the version, from its record, where the driver knows it."""
    sync_dir: str | None = None
    """The folder of the run, as the engine reaches it: only where the engine is to go over to it."""
    action: Action = "apply"
    """`staged` fails at once if the version is not staged, and touches no weight. `prepare` also makes every check and
    readies the update without writing a weight. `apply` waits, prepares if need be, and writes. `confirm` fails if the
    engine is not at this very version. `prepare_switch` and `switch` are `prepare` and `apply` for a version of another
    run of the same base, to which the engine goes over. `check` fails if the engine must not serve. `verify` compares
    all live weights with the version (by default the engine's own) and fails if any differs. `repair` writes over
    weights that are not those of the engine's own version, whole; `prepare_repair` fails at once if what it needs is
    not there."""
    allow_rollback: bool = False
    """Whether `version` may be an earlier one than the engine has; else that is an error."""
    timeout_s: float | None = None
    """How long `apply` waits for a version that is not staged, `verify` and `repair` for what they compare with."""
    target_weights_path: str | None = None
    """The local folder of an OpenRL delta, for an engine without a run."""

    def __post_init__(self) -> None:
        _check("version", self.version, int, optional=True)
        for name in ("run", "digest", "sync_dir", "target_weights_path"):
            _check(name, getattr(self, name), str, optional=True)
        refuse_credentials(self.sync_dir or "", "sync_dir")
        if (self.sync_dir is not None) != (self.action in _OF_OTHER_RUN):
            raise ValueError("update_info: sync_dir goes with prepare_switch and switch, and they need it")
        if self.action not in get_args(Action):
            raise ValueError(f"update_info: action must be {', '.join(get_args(Action))}, found {self.action!r}")
        if not isinstance(self.allow_rollback, bool):
            raise ValueError(f"update_info: allow_rollback must be a bool, found {self.allow_rollback!r}")
        if self.version is not None and self.version < 0:
            raise ValueError(f"update_info: version must not be negative, found {self.version}")
        if self.timeout_s is not None:
            _check_seconds("timeout_s", self.timeout_s)
        given = (self.version is not None) + (self.target_weights_path is not None)
        if self.action == "verify":
            if self.target_weights_path is not None:
                raise ValueError("update_info: verify compares with a version of the run, not with a folder")
        elif given != (0 if self.action in _OF_NO_VERSION else 1):
            raise ValueError(
                'update_info: give {"version": N, "run": id}, or {"target_weights_path": folder} for OpenRL'
            )


def _check(name: str, value: object, kind: type, *, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} must be {kind.__name__}, found {value!r}")


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise ValueError(f"{name} must be a number of seconds, found {value!r}")
