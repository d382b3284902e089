# SPDX-License-Identifier: Apache-2.0
"""What ``doctor`` looks at in this Python environment: vLLM, the plugin, and with a model how each tensor is served."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from vllm_delta_snapshot._version import __version__
from vllm_delta_snapshot.cli.doctor.check import Check
from vllm_delta_snapshot.errors import DeltaSnapshotError
from vllm_delta_snapshot.plugin import BACKEND

__all__ = ["model_check", "vllm_checks"]

_GROUP: Final = "vllm.general_plugins"


def vllm_checks() -> Iterator[Check]:
    """Yield what was found of vLLM and of the plugin in this environment."""
    yield Check("vllm-delta-snapshot", True, __version__)
    if importlib.util.find_spec("vllm") is None:
        yield Check("vllm", False, "not installed here", "pip install vllm, in the environment of the engine.")
        return
    from vllm_delta_snapshot.engine.compat import check_vllm
    from vllm_delta_snapshot.engine.table import vllm_version

    try:
        check_vllm()
        yield Check("vllm", True, vllm_version())
    except DeltaSnapshotError as error:
        yield Check("vllm", False, str(error))
    yield _plugin_check()
    is_dev = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    hint = "" if is_dev else "Servers need VLLM_SERVER_DEV_MODE=1, or vLLM has no routes for updates."
    yield Check("VLLM_SERVER_DEV_MODE", True, "1" if is_dev else "not set in this shell", hint)


def _plugin_check() -> Check:
    owners = [
        f"{point.value} ({point.dist.name} {point.dist.version})" if point.dist else point.value
        for point in importlib.metadata.entry_points(group=_GROUP)
        if point.name == BACKEND
    ]
    if len(owners) != 1:
        hint = "Install vllm-delta-snapshot in this environment." if not owners else "Uninstall one of them."
        return Check("plugin", False, ", ".join(owners) or "vLLM would not find it", hint)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None:
        return Check("plugin", True, owners[0])
    if BACKEND not in allowed.split(","):
        return _left_out(allowed)
    others = [name for name in allowed.split(",") if name != BACKEND]
    hint = f"vLLM loads these plugins and no others: VLLM_PLUGINS={allowed!r}." if others else ""
    return Check("plugin", True, f"{owners[0]}, named in VLLM_PLUGINS", hint)


def _left_out(allowed: str) -> Check:
    # vLLM does not strip the names, so one with a space before it is none; nor is one with a hyphen or in quotes.
    names = [name for name in re.split(r"[\s,;:]+", re.sub(r"[\"'\[\]]", "", allowed)) if name]
    meant = [name for name in names if name.lower().replace("-", "_").removeprefix("vllm_") == BACKEND]
    fixed = ",".join([*(name for name in names if name not in meant), BACKEND])
    verb = "Correct it" if meant else "Add it"
    hint = f'{verb}: VLLM_PLUGINS="{fixed}" (commas, no spaces), or unset the variable.'
    return Check("plugin", False, f"VLLM_PLUGINS={allowed!r} leaves it out", hint)


def model_check(model: str, options: Mapping[str, Any]) -> tuple[Check, list[dict[str, str]] | None]:
    """Start an engine on a model; return what was found, and how each tensor would be served."""
    from vllm_delta_snapshot.engine.table import apply_table

    try:
        choices = apply_table(model, {key: value for key, value in options.items() if value is not None})
    except Exception as error:  # noqa: BLE001 - vLLM's own errors too are findings
        return Check("model", False, f"{type(error).__name__}: {error}"), None
    table = [{"name": name, "way": choice.way, "reason": choice.reason} for name, choice in choices.items()]
    counts = Counter(choice.way for choice in choices.values())
    detail = ", ".join(f"{count} by {way}" for way, count in counts.most_common())
    hint = 'What the engine rightly does not use can be named in init_info {"skip": ...}.' if counts["refused"] else ""
    return Check("model", not counts["refused"], f"{Path(model).name}: {detail}", hint), table
