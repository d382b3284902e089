"""A tiny Llama for the pages: a checkpoint that transformers and vLLM load, and a module with its names that trains.

The module is plain torch, as importing transformers takes longer than all blocks that do without.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

VOCABULARY, WIDTH, INNER, HEADS, HEAD = 512, 64, 128, 2, 32


class Attention(nn.Module):
    """The projections of an attention."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(WIDTH, HEADS * HEAD, bias=False))


class Layer(nn.Module):
    """A layer's parameters; `forward` is a plain feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(WIDTH, INNER, bias=False),
                "up_proj": nn.Linear(WIDTH, INNER, bias=False),
                "down_proj": nn.Linear(INNER, WIDTH, bias=False),
            }
        )
        self.input_layernorm = nn.RMSNorm(WIDTH)
        self.post_attention_layernorm = nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x and what the layer adds to it."""
        return x + self.mlp["down_proj"](self.mlp["gate_proj"](x).sigmoid() * self.mlp["up_proj"](x))


class TinyModel(nn.Module):
    """The module. Its loss is of the next token, from the one before it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.model.layers = nn.ModuleList([Layer(), Layer()])
        self.model.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of tokens."""
        x = self.model.embed_tokens(tokens[:, :-1])
        for layer in self.model.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.lm_head(self.model.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def make_tiny_model() -> TinyModel:
    """Return the model with the weights of the base checkpoint, as fp32 masters."""
    torch.manual_seed(0)
    return TinyModel().to(torch.bfloat16).float()


def write_tiny_checkpoint(folder: Path) -> Path:
    """Write the base checkpoint."""
    folder.mkdir(parents=True)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in make_tiny_model().state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def batch_of(number: int) -> torch.Tensor:
    """Return a batch of tokens."""
    return torch.randint(0, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(number))
