"""Tied weights: what a checkpoint says of them, and which two tensors they are."""

import json
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import write_checkpoint
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.checkpoint.tied import Tie, counterpart_of, role_of, says_tied, tie_of

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"tie_word_embeddings": true}', True),
        ('{"tie_word_embeddings": false}', False),
        ('{"text_config": {"tie_word_embeddings": true}}', True),
        ('{"tie_word_embeddings": true, "text_config": {"tie_word_embeddings": false}}', None),
        ('{"tie_word_embeddings": "yes"}', None),
        ("{}", None),
        ("[]", None),
        ("{", None),
        (None, None),
    ],
)
def test_only_what_the_configuration_says_throughout_counts(config: str | None, said: bool | None, tmp_path: Path):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert says_tied(tmp_path) is said


@pytest.mark.parametrize(
    ("name", "role"),
    [
        (EMBED, "embedding"),
        ("transformer.wte.weight", "embedding"),
        ("model.language_model.embed_tokens.weight", "embedding"),
        (HEAD, "head"),
        ("embed_out.weight", "head"),
        ("model.layers.61.embed_tokens.weight", None),
        ("model.layers.61.shared_head.head.weight", None),
        ("mtp.embed_tokens.weight", None),
        ("model.mtp_block.lm_head.weight", None),
        ("lm_head.bias", None),
        ("weight", None),
        ("model.norm.weight", None),
    ],
)
def test_roles_go_by_names_of_the_model_itself(name: str, role: str | None):
    assert role_of(name) == role


def test_counterpart_is_the_only_one_of_its_kind():
    names = [EMBED, HEAD, "model.norm.weight", "mtp.embed_tokens.weight"]
    assert counterpart_of(HEAD, names) == EMBED
    assert counterpart_of(EMBED, names) == HEAD
    assert counterpart_of("model.norm.weight", names) is None
    assert counterpart_of(HEAD, [*names, "vision.embed.weight"]) is None


def made(folder: Path, head: torch.Tensor | None, *, is_tied: bool = True) -> Checkpoint:
    tensors = {EMBED: torch.ones(3, 2)} | ({} if head is None else {HEAD: head})
    write_checkpoint(folder, tensors)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": is_tied}))
    return Checkpoint(folder)


def test_tie_is_two_stored_tensors_that_are_said_to_be_one(tmp_path: Path):
    assert tie_of(made(tmp_path, torch.ones(3, 2))) == Tie(EMBED, HEAD, are_equal=True)
    assert tie_of(made(tmp_path, torch.ones(3, 2, dtype=torch.bfloat16))) == Tie(EMBED, HEAD, are_equal=False)
    assert tie_of(made(tmp_path, -torch.ones(3, 2))) == Tie(EMBED, HEAD, are_equal=False)
    assert tie_of(made(tmp_path, torch.ones(3, 2), is_tied=False)) is None
    assert tie_of(made(tmp_path, torch.ones(2, 2))) is None
    assert tie_of(made(tmp_path, None)) is None
