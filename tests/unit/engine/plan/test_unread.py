"""Tensors that the model's loader never reads: which of them an engine may leave out, and which not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.checkpoints import write_checkpoint
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.engine.plan.load_plan import PlanSummary
from vllm_delta_snapshot.engine.plan.unread import choose_unread, unread_by_all

EMBED, HEAD, DRAFT = "model.embed_tokens.weight", "lm_head.weight", "mtp.weight"


def made(folder: Path, *, head: float = 1.0, is_tied: bool | None = True) -> Checkpoint:
    write_checkpoint(folder, {EMBED: torch.ones(3, 2), HEAD: torch.full((3, 2), head), DRAFT: torch.ones(2)})
    (folder / "config.json").write_text(json.dumps({} if is_tied is None else {"tie_word_embeddings": is_tied}))
    return Checkpoint(folder)


def speculative(method: str | None) -> Any:
    return SimpleNamespace(speculative_config=None if method is None else SimpleNamespace(method=method))


def test_unread_is_what_no_worker_reads():
    summaries = [PlanSummary({}, {}, unread=frozenset(names)) for names in ("ab", "bc", "b")]
    assert unread_by_all(summaries) == {"b"}


def test_what_a_reloaded_layer_is_given_is_no_unread_tensor():
    """Its loaders are replaced while a plan is recorded, and read nothing."""
    plain = PlanSummary({}, {}, unread=frozenset("abc"))
    other = PlanSummary({}, {"b": "no place"}, {"a": "mlp"}, unread=frozenset("abc"))
    assert unread_by_all([plain, other]) == {"c"}


@pytest.mark.parametrize("method", [None, "ngram"])
def test_draft_head_and_equal_copy_are_left_out(method: str | None, tmp_path: Path):
    choices = choose_unread([HEAD, DRAFT], made(tmp_path), speculative(method))
    assert {name: choice.way for name, choice in choices.items()} == {HEAD: "unread", DRAFT: "unread"}
    assert choices[HEAD].reason == f"a copy of {EMBED}, which the model takes for both"


def test_nothing_is_left_out_where_a_draft_model_may_read_it(tmp_path: Path):
    choices = choose_unread([HEAD, DRAFT], made(tmp_path), speculative("mtp"))
    assert {choice.way for choice in choices.values()} == {"refused"}
    assert "its draft model may" in choices[DRAFT].reason
    assert choose_unread([], made(tmp_path), speculative("mtp")) == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"head": 2.0}, "but the checkpoint stores two that differ"),
        ({"is_tied": None}, "config.json does not say that the two are tied"),
        ({"is_tied": False}, "config.json does not say that the two are tied"),
    ],
)
@pytest.mark.parametrize(("name", "other"), [(HEAD, EMBED), (EMBED, HEAD)])
def test_head_that_may_come_to_differ_is_refused_as_what_it_is(
    options: dict[str, Any], said: str, name: str, other: str, tmp_path: Path
):
    [choice] = choose_unread([name], made(tmp_path, **options), speculative(None)).values()
    assert choice.way == "refused"
    assert choice.reason.startswith(f"the model never reads it and takes {other} for it")
    assert said in choice.reason
