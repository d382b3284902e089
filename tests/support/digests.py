"""Digests of live weights, computed here and not by vLLM, whose own weight checker came with 0.32."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_BUFFER = "buffer "


def weight_digests(model: torch.nn.Module) -> dict[str, str]:
    """Return the SHA-256 of the bytes of every parameter and every buffer. The names of buffers are marked."""
    tensors = dict(model.named_parameters())
    tensors |= {_BUFFER + name: buffer for name, buffer in model.named_buffers()}
    return {name: _sha256(tensor) for name, tensor in tensors.items()}


def digests_in_worker(worker: Any) -> dict[str, str]:
    """Return the digests of a worker's model: what `collective_rpc` of an in-process `LLM` takes to the workers."""
    return weight_digests(worker.model_runner.get_model())


def merged(workers: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the digests of all workers in one; with several, each name says which worker's it is."""
    if len(workers) == 1:
        return dict(workers[0])
    return {f"worker {rank}: {name}": digest for rank, worker in enumerate(workers) for name, digest in worker.items()}


def parameters_in(digests: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of parameters only: buffers may be constants that no training changes."""
    return {name: digest for name, digest in digests.items() if _BUFFER not in name}


def unchanged(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the parameters that are the same in both."""
    return [name for name, digest in parameters_in(after).items() if digest == before[name]]


def drift(worker: Any, rank: int | None = None) -> None:
    """Flip the lowest bit of every element of every parameter, on all workers or one."""
    if rank not in (None, worker.rank):
        return
    for parameter in worker.model_runner.get_model().parameters():
        storage = torch.empty(0, dtype=torch.uint8).set_(parameter.untyped_storage())  # type: ignore[call-overload]
        storage[:: parameter.element_size()] ^= 1


class DigestsOfWorker:
    """Added to a server's workers by ``--worker-extension-cls``, and asked through ``/collective_rpc``."""

    model_runner: Any

    def drift(self) -> None:
        """See `drift`."""
        drift(self)

    def weight_digests(self) -> dict[str, str]:
        """Return the digests of this worker's model."""
        return digests_in_worker(self)


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
