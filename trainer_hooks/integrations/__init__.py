# SPDX-License-Identifier: Apache-2.0
"""Adapters: the publisher in the frameworks that people train with. One module each, and none imports another's.

`transformers` (a `Trainer` callback), `accelerate` (a loop of one's own), `trl` (GRPO and its kin with a vLLM server,
the asynchronous trainer), `vllm` (a trainer engine for vLLM's factory), `skyrl` (SkyRL 0.4, through that engine).
`rounds` is what they share. Nothing is imported here, so that no framework has to be installed.
"""
