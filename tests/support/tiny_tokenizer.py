"""A tokenizer for the tiny models: digits and signs are tokens, everything else is one of many words."""

from __future__ import annotations

from pathlib import Path

SIGNS = ["<pad>", "<eos>", "<unk>", *"0123456789", "+", "=", *"abcdefghijklmnopqrstuvwxyz"]


def save_tokenizer(folder: Path, *, size: int = 512) -> None:
    """Write a tokenizer of `size` tokens beside a checkpoint."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate([*SIGNS, *(f"w{n}" for n in range(len(SIGNS), size))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
