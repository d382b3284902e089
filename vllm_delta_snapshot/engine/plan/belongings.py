# SPDX-License-Identifier: Apache-2.0
"""All tensors and numbers that a layer has at hand, wherever it keeps them.

Not parameters and buffers alone: also plain attributes, what hangs on a parameter, quantization methods, their
configurations and kernels, attention implementations, and what closures hold. Whatever makes a layer anew (a reload,
post-processing) may put new objects into any of these places, while captured graphs, and an undo, need the ones that
were there. So the containers are remembered, and afterwards have their old tensors again, with the new content.

Other layers of the model, vLLM's configuration and process groups are not entered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch

from vllm_delta_snapshot.errors import ApplyError

__all__ = ["Belongings", "address_of", "identities_of", "same_bits"]

_NOT_WEIGHTS: Final = frozenset({"kv_cache", "weight_loader", "_weight_loader"})
_CLOSED_TYPES: Final = (type, ModuleType, Enum, BuiltinFunctionType, str, bytes, int, float, complex)
_CLOSED_MODULES: Final = (
    "torch.",
    "vllm.config",
    "vllm.distributed",
    "vllm.compilation",
    "vllm.logger",
    "transformers.",
    "logging",
    "threading",
    "weakref",
)
_OF_MODULES: Final = frozenset({"_parameters", "_buffers", "_modules"})
_Content = dict[Any, Any]


def identities_of(model: torch.nn.Module) -> frozenset[int]:
    """Return the identities of all modules of a model."""
    return frozenset(id(module) for module in model.modules())


@dataclass(frozen=True, slots=True, eq=False)
class Belongings:
    """What some layers had at hand at one time.

    Attributes:
        modules: the layers, by name.
        outside: identities of modules that are not entered.
        containers: every object that was entered, with what it held.
        tensors: by path.
        numbers: floating-point numbers, by path, each with the container and the key.
    """

    modules: Mapping[str, torch.nn.Module]
    outside: frozenset[int]
    containers: list[tuple[Any, _Content]]
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, tuple[Any, Any, float]]

    @classmethod
    def of(cls, modules: Mapping[str, torch.nn.Module], others: frozenset[int], *, alone: bool = False) -> Belongings:
        """Look at what these layers have at hand. Reads no tensor.

        Args:
            modules: the layers, by name.
            others: identities of modules that are not entered (see `identities_of`); those of the layers, and of
                what is below them, may be among them.
            alone: whether the modules below them are not entered.
        """
        own = {id(child) for module in modules.values() for child in ([module] if alone else module.modules())}
        found = cls(modules, others - own, [], {}, {})
        seen: set[int] = set()
        for name, module in modules.items():
            found._enter(name, module, seen)
        return found

    def _enter(self, start: str, first: Any, seen: set[int]) -> None:
        pending = [(start, first)]
        while pending:
            path, value = pending.pop()
            if isinstance(value, torch.Tensor):
                self.tensors[path] = value
            if id(value) in seen:
                continue
            seen.add(id(value))
            for owner in _owners(value, self.outside):
                content = _read(owner)
                if not isinstance(owner, tuple):
                    self.containers.append((owner, content))
                for key, child in sorted(content.items(), key=lambda item: str(item[0])):  # the same order each time
                    below = path if key in _OF_MODULES and isinstance(owner, torch.nn.Module) else f"{path}.{key}"
                    if isinstance(child, float):
                        self.numbers[below] = (owner, key, child)
                    elif key not in _NOT_WEIGHTS:
                        pending.append((below, child))

    def put_back(self) -> None:
        """Have every container hold the very objects that it held."""
        for owner, content in self.containers:
            _write(owner, content)

    def settle(self) -> None:
        """Keep the tensors that were there, with the content of those that have come in their places.

        Raises:
            ApplyError: something has come that does not fit, or does not come any more. What was there is put back,
                its content may be anything.
        """
        now = Belongings.of(self.modules, self.outside)
        self.put_back()
        for path, old in self.tensors.items():
            new = now.tensors.get(path)
            if new is old:
                continue
            if new is None or (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
                raise ApplyError(
                    "a layer has another form than before",
                    tensor=path,
                    expected=f"{list(old.shape)} of {old.dtype}",
                    found="nothing" if new is None else f"{list(new.shape)} of {new.dtype}",
                )
            if old.numel() and not old.is_meta:
                _unrepeated(old).copy_(_unrepeated(new))
        for path, (owner, key, number) in self.numbers.items():
            new_number = now.numbers.get(path, (None, None, number))[2]
            if not _same_number(number, new_number):
                if isinstance(owner, tuple):
                    raise ApplyError("a number of a layer cannot be changed in place", tensor=path)
                _write(owner, _read(owner) | {key: new_number})

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that have content, each once, by the first of their paths."""
        seen = set()
        for path, tensor in self.tensors.items():
            key = (address_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if tensor.numel() and not tensor.is_meta and key not in seen:
                seen.add(key)
                yield path, tensor

    def differs(self, now: Belongings) -> str | None:
        """Return the first path at which something else is at hand now; ``None`` if there is none. Reads no tensor."""
        for path, tensor in self.tensors.items():
            if now.tensors.get(path) is not tensor:
                return path
        for path, (_, _, number) in self.numbers.items():
            if path not in now.numbers or not _same_number(number, now.numbers[path][2]):
                return path
        return None


def address_of(tensor: torch.Tensor) -> int:
    """Return where the storage of a tensor begins; 0 if it has none."""
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors of one shape and type hold the same bits."""
    device = one.device if one.device == other.device else torch.device("cpu")
    pair = [tensor.detach().to(device).reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return bool(torch.equal(*pair))


def _owners(value: Any, outside: frozenset[int]) -> list[Any]:
    """Return the containers that make up a value; none if it is not to be entered."""
    if value is None or isinstance(value, _CLOSED_TYPES) or id(value) in outside:
        return []
    if isinstance(value, FunctionType):
        return list(value.__closure__ or ())
    if isinstance(value, MethodType):
        return [(value.__self__, value.__func__)]
    if isinstance(value, functools.partial):
        return [(value.func, value.args, value.keywords)]
    if isinstance(value, (dict, list, tuple, torch.Tensor, torch.nn.Module)):
        return [value]
    kind = f"{type(value).__module__}."
    if kind.startswith(_CLOSED_MODULES) or not (hasattr(value, "__dict__") or hasattr(type(value), "__slots__")):
        return []
    return [value]


def _read(owner: Any) -> _Content:
    """Return what a container holds, by key."""
    if isinstance(owner, CellType):
        try:
            return {"closure": owner.cell_contents}
        except ValueError:  # not filled yet
            return {}
    if isinstance(owner, dict):
        return dict(owner)
    if isinstance(owner, (list, tuple)):
        return dict(enumerate(owner))
    return {key: getattr(owner, key) for key in _slots(owner)} | dict(getattr(owner, "__dict__", {}))


def _write(owner: Any, content: _Content) -> None:
    now = _read(owner)
    if now.keys() == content.keys() and all(now[key] is content[key] for key in now):
        return
    if isinstance(owner, CellType):
        for value in content.values():
            owner.cell_contents = value
    elif isinstance(owner, list):
        owner[:] = content.values()
    elif isinstance(owner, dict):
        owner.clear()
        owner.update(content)
    else:
        slots = set(_slots(owner))
        for key in slots & content.keys():
            object.__setattr__(owner, key, content[key])
        attributes = getattr(owner, "__dict__", None)
        if attributes is not None:
            attributes.clear()
            attributes.update((key, value) for key, value in content.items() if key not in slots)


def _slots(owner: Any) -> list[str]:
    if isinstance(owner, (torch.Tensor, torch.nn.Module)):
        return []
    names: list[str] = []
    for kind in type(owner).__mro__:
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__") and hasattr(owner, name)]


def _unrepeated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view without the repetitions of an expanded tensor, which cannot be written."""
    view = tensor.data
    for dimension, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and size > 1:
            view = view.narrow(dimension, 0, 1)
    return view


def _same_number(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)
