"""The planner: plain sums of measured coefficients, and the verb that prints them."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from vllm_delta_snapshot.cli.app import app
from vllm_delta_snapshot.cli.planner import Coefficients, Setup, measured_coefficients, plan

ONES = Coefficients(
    diff_s_per_element=1e-9,
    encode_s_per_change=1e-8,
    publish_s=0.5,
    decode_s_per_change=2e-8,
    map_s_per_change=3e-8,
    prepare_s_per_change=4e-8,
    pause_s_per_change=5e-8,
    pause_s=0.01,
    bytes_per_change=((0.001, 2.0), (0.01, 1.0), (0.1, 0.5)),
    machine="a test",
)


def test_stages_are_the_sums_of_their_coefficients() -> None:
    planned = plan(Setup(params=1e9, density=0.01, gbps=1.0), ONES)
    assert planned.payload_bytes == pytest.approx(1e7)
    assert planned.checkpoint_bytes == 2e9
    assert planned.seconds == pytest.approx(
        {"diff": 1.5, "encode": 0.1, "upload": 0.08, "fetch": 0.08, "stage": 0.5, "prepare": 0.4, "pause": 0.51}
    )
    assert planned.bottleneck == "diff"
    assert planned.total_s == pytest.approx(sum(planned.seconds.values()))
    assert planned.pause_s == planned.seconds["pause"]
    assert planned.checkpoint_s == pytest.approx(32.0)


def test_ranks_share_the_diff_and_workers_the_writing() -> None:
    alone = plan(Setup(1e9, 0.01, 1.0), ONES).seconds
    shared = plan(Setup(1e9, 0.01, 1.0, ranks=4, workers=2), ONES).seconds
    assert shared["diff"] - ONES.publish_s == pytest.approx((alone["diff"] - ONES.publish_s) / 4)
    assert shared["encode"] == pytest.approx(alone["encode"] / 4)
    assert shared["pause"] - ONES.pause_s == pytest.approx((alone["pause"] - ONES.pause_s) / 2)
    assert shared["stage"] == alone["stage"]  # one stager maps for both


def test_many_engines_are_held_up_by_the_store_only_if_it_has_a_limit() -> None:
    free = plan(Setup(1e9, 0.01, 1.0, engines=64), ONES)
    limited = plan(Setup(1e9, 0.01, 1.0, engines=64, store_gbps=2.0), ONES)
    assert free.seconds["fetch"] == pytest.approx(0.08)
    assert limited.seconds["fetch"] == pytest.approx(0.08 * 32)
    assert limited.bottleneck == "fetch"


@pytest.mark.parametrize(
    ("density", "size"), [(1e-6, 2.0), (0.001, 2.0), (0.001 * 10**0.5, 1.5), (0.01, 1.0), (0.1, 0.5), (1.0, 0.5)]
)
def test_bytes_per_change_lie_between_the_measured_ones(density: float, size: float) -> None:
    assert ONES.bytes_at(density) == pytest.approx(size)


def test_measured_coefficients_are_complete_and_positive() -> None:
    measured = dataclasses.asdict(measured_coefficients())
    assert measured.pop("machine")
    table = measured.pop("bytes_per_change")
    assert [density for density, _ in table] == sorted(density for density, _ in table)
    assert all(0.3 < size < 6 for _, size in table)
    assert all(value >= 0 for value in measured.values())
    assert measured["diff_s_per_element"] > 0


def test_plan_prints_every_stage_and_marks_the_bottleneck() -> None:
    found = CliRunner().invoke(app, ["plan", "--params", "70e9", "--gbps", "10", "--engines", "64"])
    assert found.exit_code == 0
    assert [stage for stage in ("diff", "encode", "upload", "fetch", "pause") if stage not in found.stdout] == []
    assert found.stdout.count("<- bottleneck") == 1


def test_plan_as_json_has_the_documented_fields() -> None:
    found = CliRunner().invoke(app, ["plan", "--params", "1e9", "--gbps", "1", "--json"])
    fields = json.loads(found.stdout)
    assert fields["ok"] is True
    assert set(fields) == {
        "ok", "setup", "measured_on", "payload_bytes", "checkpoint_bytes", "seconds", "bottleneck", "total_s",
        "pause_s", "checkpoint_s",
    }  # fmt: skip


@pytest.mark.parametrize("wrong", [["--params", "0"], ["--density", "2"], ["--engines", "0"], ["--gbps", "0"]])
def test_plan_refuses_what_makes_no_sense(wrong: list[str]) -> None:
    arguments = {"--params": "1e9", "--gbps": "1"} | {wrong[0]: wrong[1]}
    found = CliRunner().invoke(app, ["plan", *[word for pair in arguments.items() for word in pair]])
    assert found.exit_code == 2
