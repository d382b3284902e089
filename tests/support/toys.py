"""Small models whose loaders do what real ones do, and what they must not; and writing through their plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from tests.support.tensors import bits_of, random_bits, rng_of, to_torch
from vllm_delta_snapshot.engine.plan.load_plan import LoadPlan
from vllm_delta_snapshot.engine.write.lanes import LiveLane, ready_lanes, write_lanes
from vllm_delta_snapshot.host.mapping import map_update
from vllm_delta_snapshot.types import Change, TensorPatch, TensorSpec, position_dtype

Pairs = Iterable[tuple[str, torch.Tensor]]
Load = Callable[["Toy", str, torch.Tensor], None]


class Toy(nn.Module):
    """Parameters of random values, and the loader they are given.

    Args:
        load: loads one tensor of the checkpoint.
        dtype: of all parameters.
        shapes: of the parameters, by name; by default one of 6 x 6 named ``qk``.
    """

    def __init__(self, load: Load, dtype: torch.dtype = torch.bfloat16, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in (shapes or {"qk": (6, 6)}).items():
            # Of a type that most checkpoints have, as what was loaded from one.
            values = torch.from_numpy(rng_of(name, shape).standard_normal(shape)).to(torch.bfloat16).to(dtype)
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self._load = load

    def load_weights(self, pairs: Pairs) -> None:
        """Load each pair."""
        for name, tensor in pairs:
            self._load(self, name, tensor)

    def bits(self) -> dict[str, list[int]]:
        """Return the bits of every parameter."""
        return {name: bits_of(parameter).tolist() for name, parameter in self.named_parameters()}


def full_patch(spec: TensorSpec, *seed: object) -> TensorPatch:
    """Return a patch of all elements, with any bits at all."""
    positions = np.arange(spec.numel, dtype=position_dtype(spec.numel))
    return TensorPatch(spec, positions, random_bits(spec.dtype, spec.numel, spec.name, *seed))


def tensor_of(patch: TensorPatch) -> torch.Tensor:
    """Return the tensor that a patch of all elements makes."""
    return to_torch(patch.values, patch.spec)


def live_lanes(plan: LoadPlan, changes: Sequence[Change]) -> list[LiveLane]:
    """Map changes and bring them to the live weights; nothing is written."""
    return ready_lanes(plan, map_update(changes, plan.places))


def write_through(plan: LoadPlan, changes: Sequence[Change]) -> None:
    """Write changes to where the plan says."""
    assert all(write_lanes(live_lanes(plan, changes)))


def specs_of(**shapes: tuple[int, ...]) -> Mapping[str, TensorSpec]:
    """Return BF16 tensors of these shapes, by name."""
    return {name: TensorSpec(name, shape, "BF16") for name, shape in shapes.items()}
