# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face checkpoint: a folder of safetensors files, read, found and patched."""

from vllm_delta_snapshot.checkpoint.folder import INDEX_NAME, Checkpoint

__all__ = ["INDEX_NAME", "Checkpoint"]
