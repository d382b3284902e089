# SPDX-License-Identifier: Apache-2.0
"""How an engine would serve each tensor of a checkpoint, found out by starting one in this process.

For `delta-snapshot doctor --model`. The engine is the real one: what it is told here is what a server with the same
options would do. Takes as long as loading the model.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_delta_snapshot.engine.compat import checkpoint_folder
from vllm_delta_snapshot.engine.ways import Choice
from vllm_delta_snapshot.engine.write.fitness import check_fitness

__all__ = ["apply_table", "vllm_version"]


def apply_table(model: str, options: Mapping[str, Any]) -> Mapping[str, Choice]:
    """Start an engine with this backend, and return the way of each tensor, refused ones included.

    Args:
        model: as `vllm.LLM` takes it.
        options: further arguments of `vllm.LLM`.

    Raises:
        DeltaSnapshotError: layers that no update can reach, or a checkpoint that the engine was not loaded from.
        Exception: the engine does not start.
    """
    with _engine(model, options) as worker:
        folder: Path = checkpoint_folder(worker.vllm_config.model_config, worker.vllm_config.load_config, None)
        fitness = check_fitness(
            worker.model_runner.get_model(),
            folder,
            (),
            are_weights_as_loaded=True,
            has_mirror=True,
            config=worker.vllm_config,
            refuses=False,
        )
        return fitness.choices


def vllm_version() -> str:
    """Return the version of the installed vLLM."""
    import vllm

    return str(vllm.__version__)


@contextlib.contextmanager
def _engine(model: str, options: Mapping[str, Any]) -> Iterator[Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM
    from vllm.config import WeightTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory

    settings: dict[str, Any] = {
        "enforce_eager": True,  # where weights lie is the same compiled, and nothing is generated
        "max_model_len": 64,
        "max_num_seqs": 1,
        # Nothing is generated; by default vLLM would take most of the memory that there is.
        "kv_cache_memory_bytes": 256 << 20,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "uni",
        "weight_transfer_config": WeightTransferConfig(backend="delta_snapshot"),
    }
    llm: Any = LLM(model, **(settings | dict(options)))
    try:
        yield llm.llm_engine.model_executor.driver_worker.worker
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
