# SPDX-License-Identifier: Apache-2.0
"""run.json: whose folder this is, and the table of tensors that every version of the run has.

Written once, exclusively, before the first version. The table makes the folder readable without the base
checkpoint, and is what a writer and every receiver hold their own tensors against.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import FailFast, Field

from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.digest import STATE_DIGEST_ALGORITHM
from vllm_delta_snapshot.format.encodings import encoding_of
from vllm_delta_snapshot.format.wire import Count, Digest64, SpecEntry, WireModel
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["MAX_RUN_BYTES", "RunId", "RunInfo"]

MAX_RUN_BYTES: Final = 32 << 20
"""A reader refuses a larger run.json: 300 000 tensors take about 30 MB."""

RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
"""A uuid in lower case."""


class BaseIdentity(WireModel):
    """The base checkpoint: what it is called where the trainer runs, and what its bits are."""

    name: str
    state_digest: Digest64
    num_tensors: Count
    total_elements: Count


class RunInfo(WireModel):
    """The content of run.json."""

    format: Literal["delta_snapshot_run"] = "delta_snapshot_run"
    format_version: Literal[1] = 1
    run_id: RunId
    created_at: str
    tool: str
    digest_algorithm: Literal["summix64"] = STATE_DIGEST_ALGORITHM
    encodings: Annotated[tuple[str, ...], FailFast()]
    base: BaseIdentity
    tensors: Annotated[tuple[SpecEntry, ...], FailFast()]

    @property
    def has_differences(self) -> bool:
        """Whether versions of the run may hold differences, which are nothing without the exact old values.

        Raises:
            UnsupportedFormat: the run allows an encoding that this reader does not know.
        """
        return any(encoding_of(name).is_difference for name in self.encodings)

    def specs(self) -> Mapping[str, TensorSpec]:
        """Return the table of tensors by name.

        Raises:
            CorruptFile: a name appears twice, or the counts do not fit.
            UnsupportedFormat: an unknown element type.
        """
        specs = {entry.name: entry.spec() for entry in self.tensors}
        total = sum(spec.numel for spec in specs.values())
        if (len(specs), len(specs), total) != (
            len(self.tensors),
            self.base.num_tensors,
            self.base.total_elements,
        ):
            raise CorruptFile(
                "the table of tensors does not fit its counts",
                file="run.json",
                expected=f"{self.base.num_tensors} tensors, {self.base.total_elements} elements",
                found=f"{len(self.tensors)} entries, {len(specs)} names, {total} elements",
            )
        return specs
