# SPDX-License-Identifier: Apache-2.0
"""The part that runs inside vLLM's workers. vLLM is imported here and nowhere else."""
