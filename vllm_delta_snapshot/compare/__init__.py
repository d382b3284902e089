# SPDX-License-Identifier: Apache-2.0
"""What differs between two places: two versions of a run (`versions`), or two checkpoints (`checkpoints`)."""

from vllm_delta_snapshot.compare.checkpoints import compare_checkpoints
from vllm_delta_snapshot.compare.result import Comparison, TensorComparison
from vllm_delta_snapshot.compare.versions import compare_versions

__all__ = ["Comparison", "TensorComparison", "compare_checkpoints", "compare_versions"]
