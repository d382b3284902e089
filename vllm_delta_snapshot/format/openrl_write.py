# SPDX-License-Identifier: Apache-2.0
"""What an OpenRL sparse_delta version 2 consists of, from patches: one payload file and metadata.json.

The form has one file, floating point tensors and absolute values; what it cannot hold is refused, by name, before
anything is written. Reading is in `openrl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from vllm_delta_snapshot.errors import UnsupportedFormat
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.blocks import EncodedBlock, Placed
from vllm_delta_snapshot.format.container import PlannedFile, plan_file
from vllm_delta_snapshot.format.encodings import encoding_of
from vllm_delta_snapshot.format.metadata import OpenRLMetadata
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

__all__ = ["PlannedOpenRLDelta", "is_openrl_tensor", "plan_openrl_delta"]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedOpenRLDelta:
    """A delta that is ready to be written: `payload` first, then `metadata`, which makes it one.

    Attributes:
        payload: the payload file.
        metadata: its description.
    """

    payload: PlannedFile
    metadata: OpenRLMetadata


def is_openrl_tensor(spec: TensorSpec) -> bool:
    """Say whether OpenRL's reader takes values of this type: what torch calls floating point."""
    return spec.element.is_float and spec.dtype != "C64"


def plan_openrl_delta(
    patches: Sequence[TensorPatch], *, total_elements: int, base_model: str | None, model_id: str | None
) -> PlannedOpenRLDelta:
    """Plan a delta of these patches. Their arrays are referenced, not copied; tensors without a change are left out.

    Args:
        patches: one a tensor.
        total_elements: elements of the whole checkpoint.
        base_model: for people.
        model_id: for people.

    Raises:
        UnsupportedFormat: a tensor is not of floating point.
    """
    changed = [patch for patch in patches if patch.changed]
    _check_types([patch.spec for patch in changed])
    placed = [Placed(place, patch, "raw") for place, patch in enumerate(changed)]
    blocks = [EncodedBlock("raw", (item,), encoding_of("raw").encode([item.change])) for item in placed]
    count = sum(patch.changed for patch in changed)
    now = datetime.now(UTC)
    metadata = OpenRLMetadata(
        base_model=base_model,
        model_id=model_id,
        created_at=now.isoformat(),
        timestamp=now.timestamp(),
        changed_elements=count,
        total_elements=total_elements,
        density_pct=round(100.0 * count / max(1, total_elements), 3),
        layer_names=tuple(patch.spec.name for patch in changed),
        layer_shapes=tuple(patch.spec.shape for patch in changed),
    )
    return PlannedOpenRLDelta(plan_file(layout.delta_file_name(None), blocks), metadata)


def _check_types(specs: Sequence[TensorSpec]) -> None:
    refused = [spec for spec in specs if not is_openrl_tensor(spec)]
    if refused:
        more = f" and {len(refused) - 1} more tensors" if len(refused) > 1 else ""
        raise UnsupportedFormat(
            "OpenRL's sparse_delta version 2 cannot hold this tensor",
            tensor=refused[0].name,
            expected="floating point",
            found=f"{refused[0]}{more}",
            hint="Write the version as a checkpoint instead: delta-snapshot materialize.",
        )
