"""The example of FSDP2, and then what its ranks hold together: ``torchrun ... -m tests.support.fsdp2_example``."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from examples import fsdp2

if __name__ == "__main__":
    full = {}
    for name, tensor in fsdp2.main(sys.argv[2:]).state_dict().items():
        assert isinstance(tensor, DTensor), name
        assert tensor.to_local().numel() < tensor.numel(), name
        full[name] = tensor.full_tensor().to(torch.bfloat16)
    if dist.get_rank() == 0:
        save_file(full, sys.argv[1])
    dist.destroy_process_group()
