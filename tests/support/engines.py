"""Real vLLM engines on the CPU, in this process: started with the plugin, asked for tokens and checksums."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.compilers import ALL_COMPILED
from tests.support.digests import digests_in_worker
from tests.support.processor import lower

PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7], [100, 200, 300, 400])

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
    DO_NOT_TRACK="1",
)
lower()  # before vLLM is imported


class Engine:
    """An in-process `vllm.LLM`."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init(self, **init_info: object) -> None:
        """Initialize the backend."""
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def tokens(self, count: int = 24) -> list[list[int]]:
        """Return greedy tokens for the fixed prompts."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
        return [list(out.outputs[0].token_ids) for out in self.llm.generate(prompts, parameters, use_tqdm=False)]

    def answers(self, count: int = 24) -> list[list[tuple[int, float]]]:
        """Return, for the fixed prompts, the best tokens of each greedy step with their exact log-probabilities."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=5)
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
        found = self.llm.generate(prompts, parameters, use_tqdm=False)
        steps = [[sorted((t, p.logprob) for t, p in step.items()) for step in out.outputs[0].logprobs] for out in found]
        return [[pair for step in steps_of_one for pair in step] for steps_of_one in steps]

    def checksums(self) -> dict[str, str]:
        """Return digests of the live parameters and buffers of the one worker."""
        return self.all_checksums()[0]

    def all_checksums(self) -> list[dict[str, str]]:
        """Return digests of the live parameters and buffers of every worker."""
        return list(self.llm.llm_engine.collective_rpc(digests_in_worker))

    def shutdown_transfer(self) -> None:
        """Shut the backend down as `LLM.shutdown_weight_transfer_engine` does, which vLLM has since 0.32."""
        if hasattr(self.llm, "shutdown_weight_transfer_engine"):
            self.llm.shutdown_weight_transfer_engine()
        else:
            self.backend.shutdown()

    @property
    def model(self) -> Any:
        """The live model of the one worker."""
        return self.worker.model_runner.get_model()

    @property
    def worker(self) -> Any:
        """The one worker."""
        return self.llm.llm_engine.model_executor.driver_worker.worker

    @property
    def backend(self) -> Any:
        """Our end in the worker."""
        return self.worker.weight_transfer_engine

    @property
    def run_id(self) -> str:
        """The run that the engine follows."""
        return str(self.backend._at.run_id)


def run_id_in(sync_dir: Path) -> str:
    """Return the id of the run in a folder."""
    return str(json.loads((sync_dir / "run.json").read_bytes())["run_id"])


@contextlib.contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Engine]:
    """Start an engine on a checkpoint and stop it afterwards. Takes 2 to 5 seconds."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.freeze()  # vLLM has the collector pass over everything a dozen times an engine; what is there by now can stay
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "enforce_eager": not ALL_COMPILED,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 32 << 20,
        "distributed_executor_backend": "uni",
        "enable_prefix_caching": True,
        "seed": 0,
        "weight_transfer_config": WeightTransferConfig(backend="delta_snapshot"),
    }
    llm = LLM(str(folder), **(settings | options))
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()  # which thaws and collects
