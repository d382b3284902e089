# SPDX-License-Identifier: Apache-2.0
"""GRPO on word problems: GSM8K with Qwen2.5-1.5B-Instruct on GPUs, problems of our own with SmolLM2-135M on a CPU."""

import examples.grpo  # noqa: F401 - says how torch's threads wait, before torch is loaded
