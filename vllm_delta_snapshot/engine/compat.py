# SPDX-License-Identifier: Apache-2.0
"""What the plugin needs of vLLM beside the base class, where versions differ: see docs/compatibility.md.

What a class offers decides, not its version; the version is only asked for the warning that it was not tested.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from vllm_delta_snapshot.checkpoint.base_folder import find_base
from vllm_delta_snapshot.engine.log import logger
from vllm_delta_snapshot.errors import CompatibilityError, ObjectNotFound

__all__ = ["ExpertsCall", "check_vllm", "checkpoint_folder", "experts_call_reader", "take_routing"]

_PATCH_LOADER: Final = "vllm.model_executor.model_loader.checkpoint_weight_patch"
_TESTED: Final = ("0.29.", "0.30.", "0.31.", "0.32.")
_ROUTING: Final = ("use_grouped_topk", "renormalize", "scoring_func", "custom_routing_function")


def check_vllm() -> None:
    """Check that this vLLM has the patch loader; warn if it is a version that was not tested.

    Raises:
        CompatibilityError: it has not.
    """
    import vllm

    version = str(vllm.__version__)
    if importlib.util.find_spec(_PATCH_LOADER) is None:
        raise CompatibilityError(
            "this vLLM cannot apply weight patches",
            expected="vLLM 0.29 or later",
            found=f"vLLM {version}",
            hint="Upgrade vLLM.",
        )
    if not version.startswith(_TESTED):
        logger.warning("delta_snapshot was not tested with vLLM %s (tested: %sx)", version, "x, ".join(_TESTED))


def checkpoint_folder(model_config: Any, load_config: Any, given: str | None) -> Path:
    """Return the local folder of the checkpoint that the engine was loaded from.

    Args:
        model_config: vLLM's.
        load_config: vLLM's.
        given: what the user said, which wins.

    Raises:
        ObjectNotFound: it is no local folder, nor a Hub id whose snapshot is in the local cache.
        StoreError: it may not be read.
    """
    model = str(model_config.model)
    # How vLLM was told to look for its model says nothing of what the user names instead.
    is_model = given is None or given == model
    revision = getattr(model_config, "revision", None) if is_model else None
    cache_dir = getattr(load_config, "download_dir", None) if is_model else None
    try:
        return find_base(model if given is None else given, revision=revision, cache_dir=cache_dir)
    except ObjectNotFound as error:
        raise ObjectNotFound(
            "the checkpoint of this engine is not a local folder, nor in the local Hub cache",
            file=error.file,
            found=error.what if error.found is None else f"{error.what}: {error.found}",
            hint=f'{error.hint} Or name the folder in init_info: {{"checkpoint": "/path"}}.',
        ) from error


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """One call of the CPU experts' ``apply()``, the same for every version.

    Attributes:
        hidden_states: shape ``(tokens, hidden)``.
        w1: shape ``(experts, 2 * inner, hidden)``.
        w2: shape ``(experts, hidden, inner)``.
        topk_weights: shape ``(tokens, k)``.
        topk_ids: the experts chosen, of the same shape.
        activation: which function lies between the two.
        expert_map: from global to local experts.
        are_inputs_weighted: whether `hidden_states` carry the routing weights already.
        output: where the result goes; ``None`` if it is returned.
    """

    hidden_states: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    activation: Any
    expert_map: torch.Tensor | None
    are_inputs_weighted: bool
    output: torch.Tensor | None


def experts_call_reader(apply: Callable[..., Any]) -> Callable[..., ExpertsCall]:
    """Return what reads the arguments of a CPU experts class's ``apply()``, `self` included.

    Since 0.30 vLLM chooses the experts before the call and says where the output goes; 0.29 passes the router's logits,
    leaves the choice to the class and takes the output from it.
    """
    names = list(inspect.signature(apply).parameters)
    chosen_before = "topk_ids" in names

    def read(experts: Any, *args: Any, **kwargs: Any) -> ExpertsCall:
        # No `bind`: a compiler traces this.
        given = {**dict(zip(names, (experts, *args), strict=False)), **kwargs}
        hidden_states = given["hidden_states"]
        is_weighted = bool(given["apply_router_weight_on_input"])
        if chosen_before:
            topk_weights, topk_ids = given["topk_weights"], given["topk_ids"]
        else:
            topk_weights, topk_ids = _choose(experts, given)
            if is_weighted:
                hidden_states = hidden_states * topk_weights.to(hidden_states.dtype)
        return ExpertsCall(
            hidden_states=hidden_states,
            w1=given["w1"],
            w2=given["w2"],
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=given["activation"],
            expert_map=given["expert_map"],
            are_inputs_weighted=is_weighted,
            output=given["output"] if chosen_before else None,
        )

    return read


def take_routing(experts: Any, layer: torch.nn.Module) -> None:
    """Copy a layer's routing to experts that choose for themselves, which vLLM 0.29 does where it packs weights."""
    for name in _ROUTING:
        if hasattr(experts, name):
            setattr(experts, name, getattr(layer, name))


def _choose(experts: Any, given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return experts._select_experts(  # type: ignore[no-any-return]
        given["hidden_states"],
        given["router_logits"],
        given.get("num_expert_group"),
        given.get("topk_group"),
        given.get("e_score_correction_bias"),
        given.get("routed_scaling_factor"),
    )
