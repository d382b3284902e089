"""What the GRPO examples are made of: word problems and their rewards, the loss, and the tokens' probabilities."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from examples.grpo import ExampleError
from examples.grpo.policy import Rollout, advantages, completion_logprobs, objective
from examples.grpo_gsm8k.problems import draw, load_problems, number, worth
from examples.grpo_gsm8k.settings import PRESETS, read_settings


def test_bundled_problems_are_right() -> None:
    problems = load_problems("bundled")
    assert len({problem.question for problem in problems}) == 40
    for problem in problems:
        steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", problem.working)
        assert steps, problem
        for left, sign, right, result in steps:
            values = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
            assert int(result) == (int(left) / int(right) if sign == "/" else values[sign]), problem
        assert steps[-1][3] == problem.answer, problem


@pytest.mark.parametrize(
    ("text", "exact", "ladder"),
    [
        (" 7 + 5 = 12 rolls. #### 12", 1.0, 1.0),
        ("#### 3 no, it is #### 12.0.", 1.0, 1.0),
        ("#### $12", 1.0, 1.0),
        (" 7 + 5 = 12", 0.0, 0.5),
        (" 12 rolls. #### 13", 0.0, 0.2),
        (" it is 13", 0.0, 0.1),
        (" 12 ####", 0.0, 0.5),
        (" 15-3=12", 0.0, 0.5),
        (" take x12", 0.0, 0.0),
        (" no idea", 0.0, 0.0),
    ],
)
def test_an_answer_is_worth_what_it_says(text: str, exact: float, ladder: float) -> None:
    assert worth("12", text, is_exact=True) == exact
    assert worth("12", text, is_exact=False) == ladder


def test_gsm8k_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    row = {"question": "How many?", "answer": "First <<3*4=12>>12.\nThen more.\n#### 1,200"}
    path.write_text(json.dumps(row) + "\n")
    [problem] = load_problems(str(path))
    assert (problem.working, problem.answer) == ("First <<3*4=12>>12. Then more.", "1200")
    assert number("-3.00") == "-3"
    path.write_text(json.dumps(row | {"answer": "none"}) + "\n")
    with pytest.raises(ExampleError, match=r"train.jsonl, row 0: expected a question"):
        load_problems(str(path))
    with pytest.raises(ExampleError, match="no file"):
        load_problems(str(tmp_path / "other.jsonl"))


def test_every_question_comes_before_any_comes_again() -> None:
    first, second, third = (draw(4, 10, step=step, seed=1) for step in (1, 2, 3))
    assert len({*first, *second}) == 8
    assert {*first, *second} | set(third) == set(range(10))
    assert draw(4, 10, step=1, seed=2) != first


def test_both_presets_say_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert len({frozenset(preset) for preset in PRESETS.values()}) == 1
    large = read_settings(
        ["--preset", "gsm8k", "--sync-dir", "s3://bucket/run-1", "--server", "http://a:1", "--lr", "1"]
    )
    assert (large.model, large.max_tokens, large.lr) == ("Qwen/Qwen2.5-1.5B-Instruct", 512, 1.0)
    assert large.sync_dir == "s3://bucket/run-1"
    assert Path(read_settings(["--sync-dir", "x"]).sync_dir).is_absolute()
    for wrong in (["--follow"], ["--wait-for", "a"], ["--samples", "1"]):
        with pytest.raises(SystemExit):
            read_settings(wrong)
        assert "error:" in capsys.readouterr().err


def test_the_clipped_ratio_moves_fresh_tokens_as_the_plain_loss_does() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    weights = torch.tensor([[1.0], [-1.0]])
    [plain] = torch.autograd.grad(objective(logprobs, logprobs.detach(), weights, None).sum(), logprobs)
    [ratio] = torch.autograd.grad(objective(logprobs, logprobs.detach(), weights, 0.2).sum(), logprobs)
    assert torch.equal(plain, ratio)
    # A token that has become much likelier since it was sampled gains no more; one to be made rarer still does.
    [stale] = torch.autograd.grad(objective(logprobs, logprobs.detach() - 1, weights, 0.2).sum(), logprobs)
    assert stale[0].tolist() == [0.0, 0.0]
    assert (stale[1] < -2).all()


def test_probabilities_are_those_of_the_whole_text() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).bfloat16().float().eval()
    group = [
        Rollout(0, (1, 5, 9), completion, (0.0,) * len(completion), reward)
        for completion, reward in (((3, 4, 8, 2), 1.0), ((7, 2), 0.0))
    ]
    found, mask = completion_logprobs(model, [group])
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    for row, item in zip(found, group, strict=True):
        text = torch.tensor([[*item.prompt, *item.completion]])
        whole = model(input_ids=text).logits[0, len(item.prompt) - 1 : -1].log_softmax(-1)
        expected = whole.gather(-1, torch.tensor(item.completion)[:, None]).squeeze(-1)
        torch.testing.assert_close(row[: len(item.completion)], expected)
    assert advantages(group).tolist() == pytest.approx([1.0, -1.0], abs=1e-3)
