# SPDX-License-Identifier: Apache-2.0
"""What a trainer's own checkpoint remembers of the run it publishes, and whether the store still agrees.

A resumed trainer does not need it: the published state is rebuilt from the store. It catches what the store alone
cannot tell: a sync_dir that is another run's, or an older copy of this one, where numbers would be used twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_delta_snapshot.errors import BrokenChain, ObjectNotFound, RunMismatch, VersionConflict
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.runs.run_folder import RunFolder

__all__ = ["SavedState"]


class SavedState(BaseModel):
    """See the module.

    Attributes:
        run_id: the run.
        version: its newest committed version when this was taken.
        state_digest: the state digest of that version.
        sync_dir: where the run was; a run may have been moved since.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    run_id: str
    version: int = Field(ge=0)
    state_digest: str
    sync_dir: str

    @classmethod
    def of(cls, state: Mapping[str, object]) -> SavedState:
        """Read what `DeltaPublisher.state_dict` returned.

        Raises:
            RunMismatch: it is something else.
        """
        try:
            return cls.model_validate(dict(state))
        except ValidationError as error:
            raise RunMismatch(
                "this is not the state of a publisher",
                expected=", ".join(cls.model_fields),
                found=", ".join(map(str, state)) or "nothing",
                hint="Give what state_dict() returned, or leave it out to continue whatever sync_dir holds.",
            ) from error

    def check(self, folder: RunFolder) -> None:
        """Check that a folder holds this run, at this version or a later one. Blocks; reads little and writes nothing.

        Raises:
            RunMismatch: there is no run, or another one.
            BrokenChain: the run has gone back: its newest version is older.
            VersionConflict: its version of this number is not the one that was published.
            StoreError, StoreUnavailable, CorruptFile: the store cannot be read.
        """
        uri = folder.store.uri
        try:
            run = folder.read_run()
        except ObjectNotFound as error:
            raise self._other_run(uri, "no run") from error
        if run.run_id != self.run_id:
            raise self._other_run(uri, f"run {run.run_id}")
        versions = folder.versions()
        newest = folder.newest()
        if newest < self.version:
            raise BrokenChain(
                "the run has gone back since the trainer's checkpoint was written",
                file=uri,
                expected=f"version {self.version} or newer",
                found=f"version {newest}",
                hint="Version numbers are never used twice: restore the missing versions, or start a new run in a "
                "sync_dir of its own and initialize the engines with it.",
            )
        if self.version and self.version not in versions:
            return  # no longer kept; later versions continue it
        digest = folder.read_version(self.version).state_digest if self.version else run.base.state_digest
        if digest != self.state_digest:
            raise VersionConflict(
                f"version {self.version} is not the one that this trainer published",
                file=f"{uri}/{layout.version_key(self.version) if self.version else layout.RUN_KEY}",
                expected=f"state digest {self.state_digest}",
                found=digest,
                hint="Another trainer went on from an older copy of the run. Start a new run in a sync_dir of its own.",
            )

    def _other_run(self, uri: str, found: str) -> RunMismatch:
        return RunMismatch(
            "the trainer's checkpoint belongs to another run",
            file=f"{uri}/{layout.RUN_KEY}",
            expected=f"run {self.run_id}, last published to {self.sync_dir}",
            found=found,
            hint="Give that sync_dir; or, for a new run, leave the saved state out and initialize the engines again.",
        )
