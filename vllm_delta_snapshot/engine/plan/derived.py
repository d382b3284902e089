# SPDX-License-Identifier: Apache-2.0
"""Tensors that layers compute from weights after loading, and that lie in no place of the plan: computed again.

MLA's absorbed projections, if `kv_b_proj` is quantized; attention sinks in fp32; split router weights. Which there are
is found by running each layer's own post-processing once more and watching where the content of weights flows: all
that a layer has at hand afterwards, wherever it keeps it, and that weights flowed into, is derived, unless it is a view
of weights. So constants (slopes, rotary caches, scales of the cache) are not, whatever they look like. Computing again
from unchanged weights must make the very bits that are there, or the layer is refused. Addresses are kept.

Collective where a layer's post-processing is (MLA with replicated queries gathers over its context-parallel group).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_delta_snapshot.engine.plan.belongings import Belongings, address_of, identities_of, same_bits
from vllm_delta_snapshot.engine.plan.layers import is_plain_method, loaded_names, post_processing
from vllm_delta_snapshot.engine.plan.recorder import written_by
from vllm_delta_snapshot.errors import ApplyError

__all__ = ["DerivedPlan", "find_derived", "find_unexplained"]


@dataclass(frozen=True, slots=True)
class DerivedPlan:
    """Which layers compute tensors from weights, and from which.

    Attributes:
        modules: the layers, by module name.
        paths: by module name, the derived tensors, as `Belongings` name them.
        sources: by module name, where the weights begin that were read.
        numbers: the layers that read weights as numbers; they cannot follow an update that changes one of theirs.
        others: identities of all modules of the model.
    """

    modules: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    paths: Mapping[str, frozenset[str]] = field(default_factory=dict)
    sources: Mapping[str, frozenset[int]] = field(default_factory=dict)
    numbers: frozenset[str] = frozenset()
    others: frozenset[int] = frozenset()

    def touched(self, addresses: Iterable[int]) -> list[str]:
        """Return the layers that compute from some of these storages."""
        changed = frozenset(addresses)
        return [layer for layer, read in self.sources.items() if read & changed]

    def backup(self, layers: Iterable[str]) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return, by layer, the derived tensors, each with a copy in the host's memory."""
        copies = {}
        for layer in layers:
            held = Belongings.of({layer: self.modules[layer]}, self.others)
            live = [held.tensors[path] for path in sorted(self.paths[layer])]
            copies[layer] = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in live]
        return copies

    def recompute(self, layers: Iterable[str], config: Any) -> None:
        """Compute the derived tensors of some layers from the weights as they are now, in place.

        Raises:
            Exception: whatever the post-processing raises; the tensors may hold anything then.
        """
        for layer in layers:
            with _trial(layer, self.modules[layer], self.others, config) as trial:
                trial.run()
                trial.keep(self.paths[layer], checks_numbers=layer in self.numbers)

    def differing(self, config: Any) -> dict[str, str]:
        """Say which layers have other derived tensors than their weights make, and why. Changes nothing."""
        reasons = {}
        for layer, module in self.modules.items():
            with _trial(layer, module, self.others, config) as trial:
                try:
                    trial.run()
                    wrong = trial.moved(self.paths[layer])
                except Exception as error:  # noqa: BLE001 - any failure of a foreign layer means the same
                    reasons[layer] = f"computing them again fails ({type(error).__name__}: {error})"
                    continue
                if wrong:
                    reasons[layer] = f"{_names(layer, wrong)}: other values than its weights make"
        return reasons


def find_derived(
    model: torch.nn.Module, placed: frozenset[int], config: Any, *, proves: bool = True
) -> tuple[DerivedPlan, dict[str, str]]:
    """Find the layers that compute tensors from weights. Every tensor is afterwards what it was.

    Args:
        model: the live model.
        placed: where the storages begin that updates reach.
        config: vLLM's configuration of the engine; ``None`` where there is no engine, and so nothing is derived.
        proves: whether the derived tensors must be what the weights make, bit for bit.

    Returns:
        What was found, and, by module name, what can neither be reached nor computed again, and why.
    """
    if config is None:
        return DerivedPlan(), {}
    others = identities_of(model)
    modules: dict[str, torch.nn.Module] = {}
    paths: dict[str, frozenset[str]] = {}
    sources: dict[str, frozenset[int]] = {}
    numbers: set[str] = set()
    refused: dict[str, str] = {}
    everything = {address_of(tensor) for tensor in [*model.parameters(), *model.buffers()]} - {0}
    for name, module in model.named_modules():
        if post_processing(module, config) is None or (
            is_plain_method(module) and not _has_more(module, placed, others)
        ):
            continue
        own = {address_of(tensor) for tensor in [*module.parameters(), *module.buffers()]}
        weights = frozenset((everything - own) | placed)
        with _trial(name, module, others, config) as trial:
            try:
                trial.run(weights)
                derived = trial.derived(weights)
                wrong = trial.moved(derived)
            except Exception as error:  # noqa: BLE001 - any failure of a foreign layer means the same
                refused[name] = (
                    f"what it computes after loading cannot be computed again ({type(error).__name__}: {error})"
                )
                continue
        if wrong and proves:
            refused[name] = f"keeps {_names(name, wrong)}, computed from weights; computing again makes other values"
        elif derived or trial.has_left:
            modules[name], paths[name], sources[name] = module, derived, frozenset(trial.read)
            numbers |= {name} if trial.has_left else set()
    return DerivedPlan(modules, paths, sources, frozenset(numbers), others), refused


def find_unexplained(
    model: torch.nn.Module, placed: frozenset[int], explained: Mapping[str, torch.nn.Module], config: Any
) -> dict[str, str]:
    """Find tensors that were made after loading, by nothing that can be watched, and that may hold weights.

    A tensor all of whose elements are equal, and one that the layer had before any weight was loaded, hold none.

    Args:
        model: the live model.
        placed: where the storages begin that updates reach.
        explained: the layers that are reloaded, by name.
        config: vLLM's configuration of the engine; ``None`` where there is no engine.

    Returns:
        Why each cannot be served, by its path.
    """
    if config is None:
        return {}
    others = identities_of(model)
    watched = {n: m for n, m in model.named_modules() if post_processing(m, config) is not None} | dict(explained)
    known = placed | {address_of(tensor) for _, tensor in Belongings.of(watched, others).weights()}
    known |= {address_of(t) for m in model.modules() for n, t in _own(m) if n in loaded_names(m)}
    return {
        path: f"{type(module).__name__} made it after loading, and nothing says from what"
        for name, module in model.named_modules()
        for path, tensor in Belongings.of({name: module}, others, alone=True).weights()
        if tensor.is_floating_point() and address_of(tensor) not in known and not _is_uniform(tensor)
    }


def _has_more(module: torch.nn.Module, placed: frozenset[int], others: frozenset[int]) -> bool:
    """Say whether a layer has tensors that it did not have before loading, and that updates do not reach."""
    before = loaded_names(module)
    held = Belongings.of({"": module}, others)
    return any(
        tensor.numel() > 1 and path.lstrip(".") not in before and address_of(tensor) not in placed
        for path, tensor in held.weights()
    )


class _Trial:
    """One run of a layer's post-processing, whose results are looked at before they are kept, or not."""

    def __init__(self, layer: str, module: torch.nn.Module, others: frozenset[int], config: Any) -> None:
        self.read: set[int] = set()
        self.has_left = False
        self._layer = layer
        self._module = module
        self._config = config
        self.held = Belongings.of({layer: module}, others)
        self._copies: dict[str, torch.Tensor] = {}
        self._now = self.held
        self._flow: _Flow | None = None

    def run(self, weights: frozenset[int] | None = None) -> None:
        """Run it; watch the flow from `weights`, if they are given."""
        from vllm.config import set_current_vllm_config

        process = post_processing(self._module, self._config)
        assert process is not None  # noqa: S101 - only such layers are tried
        plain = self.held.tensors.items()
        self._copies = {
            path: tensor.detach().clone() for path, tensor in plain if tensor.numel() and not tensor.is_meta
        }
        device = next((tensor.device for tensor in self._copies.values()), torch.device("cpu"))
        self._flow = None if weights is None else _Flow(weights)
        watching = self._flow or contextlib.nullcontext()
        with set_current_vllm_config(self._config), _default_dtype(self._config.model_config.dtype), device, watching:
            process()
        self._now = Belongings.of(self.held.modules, self.held.outside)
        if self._flow is not None:
            self.read, self.has_left = self._flow.read, self._flow.has_left

    def derived(self, weights: frozenset[int]) -> frozenset[str]:
        """Return what weights flowed into, and what is no view of them."""
        assert self._flow is not None  # noqa: S101 - it was watched
        flowed = self._flow.flowed - weights
        return frozenset(path for path, tensor in self._now.tensors.items() if address_of(tensor) in flowed)

    def moved(self, paths: Iterable[str]) -> list[str]:
        """Return which of these tensors are not what they were before the run."""
        wrong = []
        for path in paths:
            new, old = self._now.tensors.get(path), self._copies.get(path)
            if (
                new is None
                or old is None
                or (new.shape, new.dtype) != (old.shape, old.dtype)
                or not same_bits(new, old)
            ):
                wrong.append(path)
        return sorted(wrong)

    def keep(self, paths: frozenset[str], *, checks_numbers: bool) -> None:
        """Have these tensors hold what the run made; everything else is put back in the end."""
        for path, (_, _, number) in self.held.numbers.items() if checks_numbers else ():
            if self._now.numbers.get(path, (None, None, None))[2] != number:
                raise ApplyError("a number that a layer computes from weights has changed", tensor=path)
        for path in paths:
            new, old = self._now.tensors.get(path), self._copies[path]
            if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
                raise ApplyError("what a layer computes from weights has another form than before", tensor=path)
            self._copies[path] = new.detach().clone()

    def put_back(self) -> None:
        """Have the layer hold the objects that it had, with the content that they had, or that is to be kept."""
        self.held.put_back()
        for path, copy in self._copies.items():
            tensor = self.held.tensors[path]
            if not same_bits(tensor, copy):
                tensor.data.copy_(copy)


@contextlib.contextmanager
def _trial(layer: str, module: torch.nn.Module, others: frozenset[int], config: Any) -> Iterator[_Trial]:
    trial = _Trial(layer, module, others, config)
    with torch.no_grad():
        try:
            yield trial
        finally:
            trial.put_back()


class _Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own base is untyped
    """Sees into which storages the content of weights flows.

    Args:
        weights: where the storages of the weights begin.

    Attributes:
        flowed: where the storages begin that have some of it, the weights' own included.
        read: where the weights begin that were read.
        has_left: whether content was read as a number.
    """

    def __init__(self, weights: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flowed = set(weights)
        self.read: set[int] = set()
        self._weights = weights
        self._alive: list[Any] = []
        self.has_left = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _addresses((args, kwargs))
        result = func(*args, **kwargs)
        if given & self.flowed or self.has_left:
            self.read |= given & self._weights
            # Read as a number, content may go anywhere: whatever is made from then on counts as made from it.
            self.has_left |= func is torch.ops.aten._local_scalar_dense.default
            made = [*tree_leaves(result), *written_by(func, args, kwargs)]
            self.flowed |= _addresses(made)
            self._alive.append(made)  # or an address could be given away again
        return result


def _addresses(values: Any) -> set[int]:
    return {address_of(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)} - {0}


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _own(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _is_uniform(tensor: torch.Tensor) -> bool:
    flat = tensor.detach().reshape(-1)
    return bool((flat[1:] == flat[:1]).all())


def _names(layer: str, paths: Sequence[str]) -> str:
    return ", ".join(path.removeprefix(layer).lstrip(".") for path in paths[:4])
