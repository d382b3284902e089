# SPDX-License-Identifier: Apache-2.0
"""GRPO on arithmetic with a live vLLM server: ``python -m examples.grpo_arithmetic``.

A trainer on the CPU and an unmodified vLLM server in its own process share nothing but a folder. Every step the server
samples answers, the trainer takes one policy-gradient step, publishes what changed, and the server takes it over while
it stays up. In the end the server's weights are compared with the trainer's, bit for bit, and with a server started
afresh.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from examples.grpo_arithmetic.check import ServerState, Verdict, compare_checkpoint, judge, served_tensors
from examples.grpo_arithmetic.model import load_tokenizer, load_trainer_model, prepare_base
from examples.grpo_arithmetic.picture import draw
from examples.grpo_arithmetic.policy import Policy, Rollout
from examples.grpo_arithmetic.rollout import greedy_tokens, sample_rollouts
from examples.grpo_arithmetic.server import VllmServer
from examples.grpo_arithmetic.settings import DemoError, Settings, clear_earlier_run, read_settings
from examples.grpo_arithmetic.tasks import Task, make_task
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot import DeltaSnapshotError
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive import ServerClient, sync_server
from vllm_delta_snapshot.materialize import materialize
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of the table; seconds and bytes as measured."""

    step: int
    version: int
    reward: float
    density: float
    delta_bytes: int
    checkpoint_bytes: int
    rollout_s: float
    train_s: float
    publish_s: float
    stage_s: float
    pause_s: float
    apply_s: float
    grad_norm: float
    logprob_gap: float
    groups_used: int
