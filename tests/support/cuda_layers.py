"""Run by a test in a process of its own: an update of a model as a CUDA engine has it, and its undo.

Writes one line of JSON: what was found wrong, by name; empty if all is right.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support import fake_cuda  # before vLLM

import torch  # isort: skip
from vllm.config import set_current_vllm_config  # isort: skip

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.engine.write import transaction
from vllm_delta_snapshot.engine.write.fitness import Fitness, check_fitness
from vllm_delta_snapshot.engine.write.updates import Update
from vllm_delta_snapshot.host.mapping import map_update
from vllm_delta_snapshot.types import TensorPatch


def main(base: Path, following: Path, rendezvous: Path, quantization: str) -> dict[str, Any]:
    """Update a model of `base` to `following`; compare with a fresh one; undo; fail half-way."""
    model, config = fake_cuda.build(base, rendezvous, quantization=quantization)
    fresh, _ = fake_cuda.build(following, rendezvous, quantization=quantization)
    with set_current_vllm_config(config), torch.no_grad():
        fitness = check_fitness(model, base, (), are_weights_as_loaded=True, has_mirror=True, config=config)
        scales = [m.quant_method.moe_quant_config for m in model.modules() if type(m).__name__ == "RoutedExperts"]
        first, second = _state(model), _state(fresh)
        prepared = transaction.prepare(fitness, _update(fitness, Checkpoint(base), Checkpoint(following)))
        prepared.commit(model, "scatter", config)
        results: dict[str, Any] = {
            "ways": sorted({choice.way for choice in fitness.choices.values()}),
            "derived": sorted(fitness.derived.modules),
            "experts": len(scales),
            "moved": len(_differing(first, second)),
            "after the update": _differing(_state(model), second),
        }
        assert prepared.undo(model)
        results["after its undo"] = _differing(_state(model), first)
        reload_layers = transaction.reload_layers

        def fails(*args: Any) -> None:
            reload_layers(*args)
            raise MemoryError("out of memory")

        transaction.reload_layers = fails
        try:
            prepared.commit(model, "scatter", config)
        except MemoryError:
            results["after a failure"] = _differing(_state(model), first)
        kept = [m.quant_method.moe_quant_config for m in model.modules() if type(m).__name__ == "RoutedExperts"]
        results["rebuilt"] = [type(new).__name__ for old, new in zip(scales, kept, strict=True) if old is not new]
    return results


def _update(fitness: Fitness, old: Checkpoint, new: Checkpoint) -> Update:
    patches = []
    for name, spec in new.specs.items():
        positions = np.flatnonzero(old.bits(name) != new.bits(name))
        if positions.size:
            patches.append(TensorPatch(spec, positions, new.bits(name)[positions]))
    mirror: Any = SimpleNamespace(version=1, is_torn=False, bits=new.bits)
    placed = [patch for patch in patches if fitness.plan.is_exact(patch.spec.name)]
    lanes = map_update(placed, fitness.plan.places)
    return Update(1, "", {p.spec.name: p.positions.size for p in patches}, {}, {}, lanes, lambda: patches, mirror)


def _state(model: torch.nn.Module) -> dict[str, bytes]:
    """Return the content of all tensors of a model and of what its quantization methods hold, found as tests do."""
    state = {}
    for name, module in model.named_modules():
        found = {"": module}
        method = getattr(module, "quant_method", None)
        for part in ("moe_quant_config", "fp8_linear"):
            found[f"quant_method.{part}"] = getattr(method, part, None)
        for part in ("_a1", "_a2", "_w1", "_w2"):
            found[f"quant_method.{part}"] = getattr(getattr(method, "moe_quant_config", None), part, None)
        kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        found["kernel"] = getattr(kernel, "quant_config", None)
        found["kernel.w1"] = getattr(found["kernel"], "_w1", None)
        found["kernel.w2"] = getattr(found["kernel"], "_w2", None)
        for place, owner in found.items():
            values = dict(getattr(owner, "__dict__", {}))
            values |= values.get("_parameters") or {}
            values |= values.get("_buffers") or {}
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and not value.is_meta:
                    content = value.detach().contiguous().reshape(-1).view(torch.uint8)
                    state[f"{name}.{place}.{key}"] = content.numpy().tobytes()
    return state


def _differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


if __name__ == "__main__":
    found = main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    sys.stdout.write(f"RESULT {json.dumps(found)}\n")
