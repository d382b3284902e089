# SPDX-License-Identifier: Apache-2.0
"""Do something to a module when, and only if, it is imported.

`register()` runs in processes that never load a model; what it prepares for those that do must cost the others nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from vllm_delta_snapshot.engine.log import logger

__all__ = ["on_import"]

Act = Callable[[ModuleType], None]


def on_import(name: str, act: Act) -> None:
    """Call `act` with module `name` as soon as it is imported; at once if it is. A failure of `act` is logged.

    Args:
        name: the module's full name.
        act: must bear being called for a module it has acted on.
    """
    if name in sys.modules:
        _try(act, sys.modules[name])
    elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, by asking the finders behind it, and adds the act to its loader."""

    def __init__(self, name: str, act: Act) -> None:
        self.name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._act)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A loader that acts on the module after it was executed."""

    def __init__(self, inner: importlib.abc.Loader, act: Act) -> None:
        self._inner = inner
        self._act = act

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _try(self._act, module)


def _try(act: Act, module: ModuleType) -> None:
    try:
        act(module)
    except Exception:  # noqa: BLE001 - an import of vLLM's must not fail because of us
        logger.exception("delta_snapshot could not prepare %s; vLLM goes on without that", module.__name__)
