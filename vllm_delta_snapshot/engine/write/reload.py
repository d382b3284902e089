# SPDX-License-Identifier: Apache-2.0
"""Reload: layers whose loaded form is not the checkpoint's are loaded again, whole, by vLLM's layerwise reload.

Which checkpoint tensors feed a layer is recorded once, by watching the model's loader while the layers are in the
state in which vLLM reloads them. That a reload makes the very bits that the engine has is proven at init, layer by
layer, with the checkpoint that it was loaded from; a layer that fails is refused. Only the layers named here are
touched. Afterwards they have the very objects that they had (parameters, quantization configurations, kernels) with
the new content, so what a graph captured stays true, and an undo reaches all that a reload touched.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.engine.bits import torch_dtype_of
from vllm_delta_snapshot.engine.plan.belongings import Belongings, same_bits
from vllm_delta_snapshot.engine.plan.live import to_device
from vllm_delta_snapshot.engine.plan.recorder import StandIns
from vllm_delta_snapshot.errors import TensorRefused
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["LayerBackup", "ReloadPlan", "out_of_reach", "prove_reload", "reload_layers", "watched_loaders"]

_HANDLER: Final = "handler_tensor"

BitsOf = Callable[[str], Bits]
"""Returns all elements of a checkpoint tensor, by name."""


@dataclass(slots=True)
class ReloadPlan:
    """Which layers are reloaded, and from which checkpoint tensors.

    Attributes:
        modules: the layers, by module name.
        methods: how each is quantized, by module name.
        tensors: by module name, the checkpoint tensors that its loader takes, in the order of the checkpoint.
        unknown: layers that take something else.
        others: identities of all modules of the model (see `Belongings.of`).
    """

    modules: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    methods: Mapping[str, str] = field(default_factory=dict)
    tensors: dict[str, list[str]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    others: frozenset[int] = frozenset()

    def backup(self, layers: Iterable[str]) -> LayerBackup:
        """Copy what some of the layers hold now."""
        return LayerBackup.of({layer: self.modules[layer] for layer in layers}, self.others)

    def touched(self, changed: Mapping[str, int]) -> list[str]:
        """Return the layers that an update touches.

        Args:
            changed: by checkpoint name, how many elements change.
        """
        return [layer for layer, names in self.tensors.items() if any(changed.get(name) for name in names)]


@contextlib.contextmanager
def watched_loaders(plan: ReloadPlan, stand_ins: StandIns) -> Iterator[None]:
    """Have the plan's layers note what is loaded into them, instead of loading it. Their weights stay as they are.

    Args:
        plan: gets `tensors` and `unknown`.
        stand_ins: what the model's loader will be run over in this context.
    """
    from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

    if not plan.modules:
        yield
        return
    loaders: list[tuple[Any, Any]] = []
    with _kept(plan.modules, plan.others):
        initialize_layerwise_reload(_Only(plan.modules))
        try:
            for layer, module in plan.modules.items():
                for tensor in get_layer_tensors(module).values():
                    loaders.append((tensor, getattr(tensor, "weight_loader", None)))
                    tensor.weight_loader = _noting(plan, layer, stand_ins)
            yield
        finally:
            for tensor, loader in loaders:
                if loader is None:
                    del tensor.weight_loader
                else:
                    tensor.weight_loader = loader


def _noting(plan: ReloadPlan, layer: str, stand_ins: StandIns) -> Callable[..., bool]:
    def note(*args: Any, **kwargs: Any) -> bool:
        # Loaders of experts are called by keyword, others by position; the parameter itself is no stand-in.
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        found = next(filter(None, map(stand_ins.find, given)), None)
        if found is None:
            plan.unknown.add(layer)
        elif found[0] not in plan.tensors.setdefault(layer, []):
            plan.tensors[layer].append(found[0])
        return True  # loaders of experts ask whether it was theirs

    return note


@dataclass(frozen=True, slots=True, eq=False)
class LayerBackup:
    """All that some layers have at hand, with its content copied to the host's memory.

    Attributes:
        held: what they have.
        tensors: each live tensor with its copy.
    """

    held: Belongings
    tensors: Sequence[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, modules: Mapping[str, torch.nn.Module], others: frozenset[int]) -> LayerBackup:
        """Copy what these layers hold now; see `Belongings.of`."""
        held = Belongings.of(modules, others)
        return cls(held, [(tensor, tensor.detach().to("cpu", copy=True)) for _, tensor in held.weights()])

    @property
    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The layers."""
        return self.held.modules

    def holds(self) -> bool:
        """Say whether the layers hold what they held: the same objects, and bit for bit the same content."""
        now = Belongings.of(self.held.modules, self.held.outside)
        return self.held.differs(now) is None and all(same_bits(tensor, copy) for tensor, copy in self.tensors)

    def restore(self) -> bool:
        """Put all back, objects and content; say whether the layers hold it."""
        self.held.put_back()
        with torch.no_grad():
            for tensor, copy in self.tensors:
                tensor.data.copy_(copy)
        return self.holds()


def reload_layers(
    model: Any, plan: ReloadPlan, layers: Sequence[str], specs: Mapping[str, TensorSpec], bits_of: BitsOf, config: Any
) -> None:
    """Load layers again. Their tensors stay where they are in memory; generation must be paused.

    Args:
        model: the live model.
        plan: where the layers are.
        layers: which of them.
        specs: the tensors of the checkpoint.
        bits_of: their content.
        config: vLLM's configuration of the engine.

    Raises:
        Exception: whatever the model's loader raises; the layers may hold anything then.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    modules = {layer: plan.modules[layer] for layer in layers}
    only = _Only(modules)
    names = dict.fromkeys(name for layer in layers for name in plan.tensors[layer])
    # All content is at hand before the first layer is begun: vLLM's processing may have collectives, and a worker
    # that fails between them leaves the others waiting.
    loaded = [(name, _tensor(specs[name], bits_of(name))) for name in names]
    with set_current_vllm_config(config), _kept(modules, plan.others) as held, torch.no_grad():
        initialize_layerwise_reload(only)
        model.load_weights(iter(loaded))
        finalize_layerwise_reload(only, config.model_config)
        held.settle()


def prove_reload(
    model: Any, plan: ReloadPlan, specs: Mapping[str, TensorSpec], bits_of: BitsOf, config: Any
) -> dict[str, str]:
    """Reload every layer from the checkpoint that the engine has, and compare bits. One layer's memory at a time.

    Afterwards all weights are what they were.

    Returns:
        Why layers cannot be reloaded, by module name.
    """
    reasons = dict.fromkeys(plan.unknown, "its loader takes something else than tensors of the checkpoint")
    reasons |= out_of_reach(plan)
    for layer in plan.modules:
        if layer in reasons:
            continue
        if not plan.tensors.get(layer):
            reasons[layer] = "its loader takes no tensor of the checkpoint"
            continue
        backup = plan.backup([layer])
        try:
            reload_layers(model, plan, [layer], specs, bits_of, config)
        except Exception as error:  # noqa: BLE001 - any failure of a foreign loader means the same
            reasons[layer] = f"reloading it fails ({type(error).__name__}: {error})"
        else:
            if not backup.holds():
                reasons[layer] = "reloading it makes other weights than loading did"
        if layer in reasons and not backup.restore():
            raise TensorRefused("a layer could not be put back after it was reloaded for a trial", tensor=layer)
    return reasons


def out_of_reach(plan: ReloadPlan) -> dict[str, str]:
    """Say, by module name, which layers compute from weights that are no tensors: no undo and no check reaches them.

    vLLM's oneDNN kernels keep an address, of memory that is freed with the object that made it.
    """
    reasons = {}
    for layer, module in plan.modules.items():
        held = Belongings.of({layer: module}, plan.others)
        if any(path.endswith(f".{_HANDLER}") for path in held.tensors):
            reasons[layer] = "it computes from weights that oneDNN packed, which no undo and no check reaches"
    return reasons


class _Only(torch.nn.Module):
    """Stands for the model in vLLM's reload, which walks over `modules()`, and shows it some layers only."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        object.__setattr__(self, "_shown", list(modules.values()))  # not as its children

    def modules(self) -> Iterator[torch.nn.Module]:  # type: ignore[override]
        """Return the shown layers only."""
        shown: list[torch.nn.Module] = vars(self)["_shown"]
        return iter(shown)


@contextlib.contextmanager
def _kept(modules: Mapping[str, torch.nn.Module], others: frozenset[int]) -> Iterator[Belongings]:
    """See to it that afterwards each layer has the very objects that it had, whatever became of a reload."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    held = Belongings.of(modules, others)
    non_persistent = [(module, set(module._non_persistent_buffers_set)) for module in modules.values()]
    loud = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = loud.level
    loud.setLevel(logging.ERROR)  # it warns of every layer that is left as it is
    try:
        yield held
    finally:
        loud.setLevel(level)
        held.put_back()
        for module, names in non_persistent:
            module._non_persistent_buffers_set = names
            get_layerwise_info(module).reset()


def _tensor(spec: TensorSpec, bits: Bits) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a mapped file is read-only, and nobody writes to it
        integers = to_device(bits, torch.device("cpu"))
    return integers.view(torch_dtype_of(spec.element.torch_name)).view(spec.shape)
