# SPDX-License-Identifier: Apache-2.0
"""Compare every live weight of an engine with a version of its run, tensor by tensor, over all workers.

The stager knows the digest of each tensor at every version: that of the checkpoint, moved by each delta. So plain
weights are digested where they lie, in blocks, and no second copy of the model is needed. Layers that are reloaded
are compared with what a reload from the mirror makes of them, one at a time, and what layers compute from weights with
what the weights make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from vllm_delta_snapshot.engine.agree import agree, gather_from_workers
from vllm_delta_snapshot.engine.bits import bits_of
from vllm_delta_snapshot.engine.plan.live_blocks import live_blocks
from vllm_delta_snapshot.engine.plan.load_plan import LoadPlan
from vllm_delta_snapshot.engine.plan.moving import refuse_moving
from vllm_delta_snapshot.engine.threads import run_each
from vllm_delta_snapshot.engine.write.fitness import Fitness
from vllm_delta_snapshot.engine.write.lanes import RunDigest, in_checkpoint_type, in_live_type
from vllm_delta_snapshot.engine.write.reload import BitsOf, prove_reload
from vllm_delta_snapshot.engine.write.verify import sum_over_workers
from vllm_delta_snapshot.errors import BaseMismatch, VerifyError
from vllm_delta_snapshot.format.digest import add_digests, format_digest, patch_digest
from vllm_delta_snapshot.host.places import Piece
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["Wrong", "check_all", "digest_live", "find_wrong"]

_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Wrong:
    """What is not as it should be.

    Attributes:
        tensors: why, by checkpoint name; the same on every worker.
        unknown: tensors that cannot be compared, because the engine keeps them in a type that loses bits, and the
            content that they were made from is not at hand.
        layers: why, by layer that is reloaded, or that computes tensors from weights; this worker's.
        elsewhere: the same of all workers, as text.
    """

    tensors: Mapping[str, str]
    unknown: Sequence[str]
    layers: Mapping[str, str]
    elsewhere: Sequence[str]

    @property
    def reasons(self) -> list[str]:
        """What is wrong on all workers, as text; empty if nothing is."""
        return [*(f"{name}: {reason}" for name, reason in self.tensors.items()), *self.elsewhere]


def check_all(
    model: Any, fitness: Fitness, expected: Mapping[str, str], *, version: int, bits: BitsOf | None, config: Any
) -> None:
    """Compare all live weights with a version, and refuse what differs: see `find_wrong`.

    Args:
        model: the live model.
        fitness: where its weights are.
        expected: by checkpoint name, the digest of the whole tensor at the version.
        version: for the message.
        bits: the checkpoint at that version, for layers that are reloaded and for types that lose bits.
        config: vLLM's configuration of the engine.

    Raises:
        VerifyError: weights differ, or some cannot be compared; names the tensors and layers.
        DeltaSnapshotError: another worker could not look.
    """
    wrong = find_wrong(model, fitness, expected, bits=bits, config=config)
    if reasons := wrong.reasons:
        more = f"; and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        raise VerifyError(
            f"live weights are not those of version {version}: {len(reasons)} of {len(fitness.choices)} differ",
            tensor="; ".join(reasons[:_SHOWN]) + more,
            hint="Write them anew: delta-snapshot repair --server URL",
        )
    if wrong.unknown:
        raise VerifyError(
            f"{len(wrong.unknown)} of {len(fitness.choices)} tensors cannot be compared with version {version}: this "
            "engine keeps them in a type that loses bits of the checkpoint's",
            tensor=", ".join(wrong.unknown[:_SHOWN]),
            hint="Write them anew: delta-snapshot repair --server URL. From then on the host has what they are made "
            "from, and they are compared with that.",
        )


def find_wrong(model: Any, fitness: Fitness, expected: Mapping[str, str], *, bits: BitsOf | None, config: Any) -> Wrong:
    """Compare all live weights. Collective over the engine's workers; blocks, in time with the model's size.

    Args: see `check_all`.

    Raises:
        TensorRefused, ApplyError: see `refuse_moving`.
        DeltaSnapshotError: this worker or another could not look.
    """
    failure: BaseException | None = None
    digests: Sequence[RunDigest] = ()
    layers: Mapping[str, str] = {}
    strange: dict[str, str] = {}
    try:
        refuse_moving(config)
        digests = digest_live(fitness.plan, fitness.specs, strange)
        if fitness.reload.modules and bits is not None:
            layers = prove_reload(model, fitness.reload, fitness.specs, bits, config)
        layers = {**layers, **fitness.derived.differing(config)}
    except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
        failure = error
    agree(failure)
    tensors: dict[str, str] = {}
    for of_worker in gather_from_workers(strange):
        tensors |= of_worker
    found = sum_over_workers(gather_from_workers(digests), tensors)
    unknown = []
    for name, choice in fitness.choices.items():
        if choice.way not in ("scatter", "loader") or name in tensors:
            continue
        total = found.get(name, 0)
        if total is None:
            unknown.append(name)
        elif format_digest(total) != expected[name]:
            tensors[name] = f"digest {expected[name]} expected, {format_digest(total)} found"
    if unknown and all(gather_from_workers(bits is not None)):
        tensors |= _differing_from(fitness, unknown, bits)
        unknown = []
    elsewhere = [
        f"{layer} on worker {rank}: {reason}"
        for rank, of_worker in enumerate(gather_from_workers(dict(layers)))
        for layer, reason in of_worker.items()
    ]
    return Wrong(tensors, unknown, layers, elsewhere)


def _differing_from(fitness: Fitness, names: Sequence[str], bits: BitsOf | None) -> dict[str, str]:
    """Compare tensors with their content, converted as when it was written. Collective: what all workers find."""
    failure: BaseException | None = None
    wrong: dict[str, str] = {}
    try:
        assert bits is not None  # noqa: S101 - the caller has asked all workers
        for name in names:
            content, spec = bits(name), fitness.specs[name]
            for piece in fitness.plan.places.pieces.get(name, ()):
                storage = fitness.plan.storages[piece.storage]
                for block in live_blocks(piece, storage.flat):
                    live = block.read()
                    if not torch.equal(
                        live, in_live_type(content[block.positions], spec.dtype, storage.dtype, live.device)
                    ):
                        wrong[name] = f"not what its content makes in {storage.dtype}"
    except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
        failure = error
    agree(failure)
    found: dict[str, str] = {}
    for of_worker in gather_from_workers(wrong):
        found |= of_worker
    return found


def digest_live(
    plan: LoadPlan, specs: Mapping[str, TensorSpec], strange: dict[str, str] | None = None
) -> list[RunDigest]:
    """Return the digest of every piece that this worker holds, in the checkpoint's type.

    Args:
        plan: where they are.
        specs: the tensors of the checkpoint.
        strange: gets, by name, what holds values that the checkpoint's type does not have.

    Raises:
        BaseMismatch: there are such values, and nobody takes their names.
    """

    def digest(item: tuple[str, Piece]) -> RunDigest:
        name, piece = item
        spec = specs[name]
        storage = plan.storages[piece.storage]
        total = 0
        for block in live_blocks(piece, storage.flat):
            try:
                bits = in_checkpoint_type(block.read(), spec.dtype, storage.dtype)
            except BaseMismatch as error:
                if strange is None:
                    raise
                strange[name] = str(error)
                return name, piece.box, None
            if bits is None:
                return name, piece.box, None
            total = add_digests(total, patch_digest(spec, block.positions, bits_of(bits)))
        return name, piece.box, total

    return run_each(digest, [item for item in plan.places if item[1].size and item[0] not in plan.problems])
