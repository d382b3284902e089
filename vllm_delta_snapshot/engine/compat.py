# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this is, and where its model's checkpoint lies: what the plugin needs of vLLM beside the base class."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

from vllm_delta_snapshot.engine.log import logger
from vllm_delta_snapshot.errors import CompatibilityError, ObjectNotFound

__all__ = ["check_vllm", "checkpoint_folder"]

_PATCH_LOADER: Final = "vllm.model_executor.model_loader.checkpoint_weight_patch"
_TESTED: Final = ("0.32.",)


def check_vllm() -> None:
    """Check that this vLLM has the patch loader; warn if it is a version that was not tested.

    Raises:
        CompatibilityError: it has not.
    """
    import vllm

    version = str(vllm.__version__)
    if importlib.util.find_spec(_PATCH_LOADER) is None:
        raise CompatibilityError(
            "this vLLM cannot apply weight patches", expected="vLLM 0.32", found=f"vLLM {version}", hint="Upgrade vLLM."
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
        ObjectNotFound: the model is a hub id whose files are not in the local cache.
    """
    name = given or model_config.model
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.absolute()
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            name,
            revision=getattr(model_config, "revision", None),
            cache_dir=getattr(load_config, "download_dir", None),
            local_files_only=True,
        )
    except Exception as error:
        raise ObjectNotFound(
            "the checkpoint of this engine is not a local folder, nor in the local hub cache",
            file=str(name),
            hint='Name the folder in init_info: {"checkpoint": "/path"}.',
        ) from error
    return Path(found)
