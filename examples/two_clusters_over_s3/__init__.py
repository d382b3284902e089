# SPDX-License-Identifier: Apache-2.0
"""Trainer and vLLM server in two networks: an S3 bucket behind a slow link is all that both reach (`__main__`)."""

import examples.grpo  # noqa: F401 - says how torch's threads wait, before torch is loaded
