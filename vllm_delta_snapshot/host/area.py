# SPDX-License-Identifier: Apache-2.0
"""The stage area: a private local folder that one stager writes and the workers of one host read.

::

    <area>/config.json                 what the stager follows
    <area>/stager.lock                 locked by the living stager
    <area>/state.json                  what it is doing; replaced atomically
    <area>/run.json                    copy of the run's, for the workers
    <area>/attached/<id>               one a worker, locked while it lives, saying which version it has and where
                                       its weights lie
    <area>/places/<id>/                where weights lie in a worker: its load plan without addresses
    <area>/wanted/<base>-<version>     an update that a worker asked for; going back is only done when asked
    <area>/fetched/<version>/          verified copies of publications
    <area>/staged/<base>-<version>/    one update each, in the form of a delta folder; appears by rename
    <area>/digests/<version>.json      the digest of every tensor at a version, once asked for by <version>.wanted
    <area>/mirror/                     the checkpoint at some version, if a worker has layers that must be reloaded
    <area>/mirror.target               which version the mirror is wanted at
    <area>/mapped/<base>-<version>-<places>/   the same, mapped for a worker; appears by rename

The folder belongs to this user alone (mode 0700); what lies in it is trusted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Literal

from pydantic import Field

from vllm_delta_snapshot.errors import FormatError, StageError
from vllm_delta_snapshot.format.run import RunInfo
from vllm_delta_snapshot.format.wire import WireModel

__all__ = ["StageArea", "StagerConfig", "StagerState", "default_stage_root", "pair_of", "stagers_of"]


class StagerConfig(WireModel):
    """What a stager follows and how."""

    sync_dir: str
    checkpoint: str
    poll_interval_s: float = Field(default=0.2, gt=0)
    retry_interval_s: float = Field(default=2.0, gt=0)
    cache_bytes: int = Field(default=1 << 36, gt=0)


class Problem(WireModel):
    """Why the stager is stuck.

    Attributes:
        version: the version that it cannot fetch or stage.
        base: from where; ``None`` if the version itself is what is wrong.
        error: the error.
    """

    version: int
    base: int | None = None
    error: dict[str, str | None]

    def concerns(self, base: int, version: int) -> bool:
        """Say whether it keeps an update from being staged."""
        if self.base is None:
            return self.version <= max(base, version)
        return (self.base, self.version) == (base, version)


class StagerState(WireModel):
    """What a stager says of itself.

    Attributes:
        status: `starting` (computing the digest of the checkpoint), `following`, or `failed` for good.
        start_version: the version that the checkpoint is; known when following.
        start_digest: its state digest.
        newest: the newest version that is fetched and verified.
        problem: why it does not get past `newest`.
        mirror_error: why the mirror is not where it is wanted.
        error: why it failed for good.
        fetched_bytes: payload that it has fetched since it was started.
        retries: how often it tried what again, by operation.
    """

    status: Literal["starting", "following", "failed"]
    pid: int
    start_version: int = 0
    start_digest: str = ""
    newest: int = 0
    problem: Problem | None = None
    mirror_error: dict[str, str | None] | None = None
    error: dict[str, str | None] | None = None
    fetched_bytes: int = 0
    retries: dict[str, int] = Field(default_factory=dict)


def default_stage_root() -> Path:
    """Return the folder for stage areas: ``$DELTA_SNAPSHOT_STAGE_DIR``, or one of this user's under the temp folder."""
    configured = os.environ.get("DELTA_SNAPSHOT_STAGE_DIR")
    return Path(configured) if configured else Path(tempfile.gettempdir()) / f"delta-snapshot-{os.getuid()}"


def stagers_of(sync_dir: str, root: Path | None = None) -> list[StagerState]:
    """Return what the stagers of this host that follow a run say of themselves. For metrics: never raises.

    Args:
        sync_dir: the run's folder, as the engines were told.
        root: the folder for stage areas; by default that of this process.
    """
    found = []
    for path in sorted((root or default_stage_root()).glob("*/config.json")):
        area = StageArea(path.parent)
        with contextlib.suppress(OSError, FormatError):
            state = area.read_state() if area.read_config().sync_dir == sync_dir else None
            found += [state] if state is not None else []
    return found


class StageArea:
    """Paths of one area, and atomic writes in it.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.lock = path / "stager.lock"
        self.state = path / "state.json"
        self.run = path / "run.json"
        self.log = path / "stager.log"
        self.attached = path / "attached"
        self.places = path / "places"
        self.wanted = path / "wanted"
        self.fetched = path / "fetched"
        self.staged = path / "staged"
        self.mapped = path / "mapped"
        self.digests = path / "digests"
        self.mirror = path / "mirror"
        self.mirror_target = path / "mirror.target"

    @classmethod
    def of(cls, root: Path, config: StagerConfig) -> StageArea:
        """Make or find the area for a configuration: engines that follow the same run from the same weights share it.

        Raises:
            StageError: the folder cannot be made, or belongs to another user.
        """
        key = hashlib.sha256(f"{config.sync_dir}\n{config.checkpoint}".encode()).hexdigest()[:16]
        area = cls(root / key)
        try:
            _make_private(root)
            for folder in area.folders():
                folder.mkdir(mode=0o700, exist_ok=True)
            area.write(area.config, config.to_json())
        except OSError as error:
            raise StageError(
                "cannot make the stage folder",
                file=str(area.path),
                found=error,
                hint="Set DELTA_SNAPSHOT_STAGE_DIR to a local folder with room.",
            ) from error
        return area

    def folders(self) -> tuple[Path, ...]:
        """Return the folders of the area, itself first."""
        return (
            self.path,
            self.attached,
            self.places,
            self.wanted,
            self.fetched,
            self.staged,
            self.mapped,
            self.digests,
        )

    def write(self, path: Path, data: bytes) -> None:
        """Replace a small file atomically."""
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        temporary.write_bytes(data)
        temporary.replace(path)

    def begin_run(self, run: RunInfo) -> None:
        """Keep a copy of run.json for the workers, and clear what was staged of a run that lay in the folder before."""
        try:
            before = RunInfo.from_json(self.run.read_bytes(), file=str(self.run)).run_id
        except (FileNotFoundError, FormatError):
            before = None
        if before != run.run_id:
            for folder in (self.fetched, self.staged, self.mapped, self.wanted, self.digests):
                for path in folder.iterdir():
                    if path.is_dir():
                        shutil.rmtree(path)
                    else:
                        path.unlink()
            self.mirror_target.unlink(missing_ok=True)
        self.write(self.run, run.to_json())

    def read_config(self) -> StagerConfig:
        """Return the configuration."""
        return StagerConfig.from_json(self.config.read_bytes(), file=str(self.config))

    def read_state(self) -> StagerState | None:
        """Return the state; ``None`` before a stager wrote one."""
        try:
            data = self.state.read_bytes()
        except FileNotFoundError:
            return None
        return StagerState.from_json(data, file=str(self.state))

    def staged_folder(self, base_version: int, version: int) -> Path:
        """Return where the update from `base_version` to `version` appears."""
        return self.staged / f"{base_version:08d}-{version:08d}"

    def mapped_folder(self, base_version: int, version: int, places: str) -> Path:
        """Return where that update, mapped for workers with these places, appears."""
        return self.mapped / f"{base_version:08d}-{version:08d}-{places}"

    def wanted_file(self, base_version: int, version: int) -> Path:
        """Return the file that says that somebody wants that update."""
        return self.wanted / f"{base_version:08d}-{version:08d}"

    def read_mirror_target(self) -> int | None:
        """Return the version that the mirror is wanted at; ``None`` if nobody needs a mirror."""
        try:
            return int(self.mirror_target.read_text())
        except FileNotFoundError:
            return None

    def fetched_folder(self, base_version: int, version: int) -> Path:
        """Return where the files of a delta are kept."""
        name = f"{version:08d}"
        return self.fetched / (name if base_version == version - 1 else f"{base_version:08d}-{name}")

    @staticmethod
    def step_of(path: Path) -> tuple[int, int] | None:
        """Return base version and version of a folder of `fetched`; ``None`` if its name has none."""
        return (int(path.name) - 1, int(path.name)) if path.name.isdigit() else pair_of(path)


def pair_of(path: Path) -> tuple[int, int] | None:
    """Return base and version of a folder or file of the area; ``None`` if its name has none."""
    base, _, rest = path.name.partition("-")
    version = rest.partition("-")[0]
    return (int(base), int(version)) if base.isdigit() and version.isdigit() else None


def try_lock(path: Path) -> int | None:
    """Lock a file for this process; return its descriptor, or ``None`` if another holds it. Freed by death."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: Path) -> bool:
    """Say whether a living process holds the lock of a file."""
    descriptor = try_lock(path)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def _make_private(root: Path) -> None:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.lstat()
    if status.st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to user {status.st_uid}")
    if status.st_mode & 0o022:
        raise PermissionError(f"{root} can be written by others")
