"""What a report computes before anything is drawn: layers, bins, touched weights, text."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.histories import make_history
from tests.support.runs import MIXED, make_mixed_run, make_run
from vllm_delta_snapshot.report.binning import bin_columns, bin_starts, bin_values
from vllm_delta_snapshot.report.history import read_history
from vllm_delta_snapshot.report.layers import layer_of, layers_of
from vllm_delta_snapshot.report.text import cut, human_seconds, percent, plain_number, printable, sparkline
from vllm_delta_snapshot.report.touched import count_touched
from vllm_delta_snapshot.types import TensorSpec


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.self_attn.q_proj.weight", "model.layers.12"),
        ("model.layers.3.mlp.experts.7.down_proj.weight", "model.layers.3"),
        ("transformer.h.0.attn.c_attn.weight", "transformer.h.0"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("lm_head.weight", "lm_head"),
        ("scale", "scale"),
        ("0.weight", "0"),
        ("layer1.weight", "layer1"),
        ("a\n.1.w", "a\n.1"),
    ],
)
def test_layer_is_the_name_up_to_its_first_number(name: str, layer: str):
    assert layer_of(name) == layer


def test_layers_are_in_the_order_of_their_numbers_and_count_their_elements():
    names = [f"model.layers.{number}.{part}" for number in (10, 9, 1) for part in ("a", "b")]
    layers = layers_of({name: TensorSpec(name, (3,), "BF16") for name in ["9.w", "model.embed.weight", *names]})
    assert [layer.name for layer in layers] == [
        "9", "model.embed", "model.layers.1", "model.layers.9", "model.layers.10"
    ]  # fmt: skip
    assert [layer.elements for layer in layers] == [3, 3, 6, 6, 6]


def test_few_values_are_not_binned():
    values = np.array([1.0, np.nan, 3.0])
    binned = bin_values(np.array([1.0, 2.0, 3.0]), values, 3)
    assert binned.size == 1
    for found in (binned.mean, binned.low, binned.high):
        assert np.array_equal(found, values, equal_nan=True)


def test_bins_keep_spikes_and_the_mean():
    values = np.ones(5000)
    values[1234] = 50.0
    values[7] = np.nan
    binned = bin_values(np.arange(5000.0), values, 400)
    assert (binned.size, binned.at.size) == (13, 385)
    assert (binned.high.max(), binned.low.min(), binned.mean.max()) == (50.0, 1.0, 62 / 13)
    assert not np.isnan(binned.mean).any()


def test_no_bin_reaches_over_a_break():
    at = np.array([1.0, 2, 3, 10, 11])
    binned = bin_values(at, at, 2, [3])
    assert binned.size == 3
    assert np.array_equal(binned.mean, [2.0, np.nan, 10.5], equal_nan=True)
    assert np.array_equal(binned.at, [2.0, 6.5, 10.5])
    assert bin_starts(5, 2, [3]).tolist() == [0, 3]


def test_bin_of_unknown_values_is_unknown():
    matrix = np.array([[np.nan, np.nan, 1.0, 3.0]])
    assert np.array_equal(bin_columns(matrix, np.array([0, 2])), [[np.nan, 2.0]], equal_nan=True)
    binned = bin_values(np.arange(4.0), matrix[0], 2)
    assert np.array_equal(binned.high, [np.nan, 3.0], equal_nan=True)


def test_nothing_makes_no_bins():
    assert bin_values(np.empty(0), np.empty(0), 10).mean.size == 0


def test_touched_weights_are_those_that_any_version_has_changed(tmp_path):
    run = make_mixed_run(tmp_path)
    history = read_history(run.folder)
    found = count_touched(run.folder, history)
    touched = {name: np.zeros(bits.size, bool) for name, bits in run.history[0].items()}
    expected = []
    for number in range(1, len(MIXED) + 1):
        for change in run.changes(number, tmp_path / f"fetched-{number}"):
            touched[change.spec.name][change.positions] = True
        expected.append(sum(int(flags.sum()) for flags in touched.values()))
    assert list(found.elements) == expected
    assert list(found.versions) == list(range(1, len(MIXED) + 1))
    assert expected[0] < expected[-1]


def test_touched_weights_end_where_the_chain_breaks(tmp_path):
    run = make_run(tmp_path, 4)
    (run.sync_dir / "versions" / "00000003.json").unlink()
    told = []
    found = count_touched(run.folder, read_history(run.folder), progress=lambda *said: told.append(said[:2]))
    assert list(found.versions) == [1, 2]
    assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([0.0, 0.0], "\u2581\u2581"),
        ([0.0, 1.0, 2.0], "\u2581\u2585\u2588"),
        ([5.0], "\u2588"),
    ],
)
def test_sparkline_reaches_from_zero_to_the_highest(values: list[float], line: str):
    assert sparkline(values) == line


def test_sparkline_of_many_values_is_short_and_keeps_the_spike():
    values = [0.01] * 5000
    values[2600] = 1.0
    line = sparkline(values)
    assert len(line) == 60
    assert line.count("\u2588") == 1


def test_text_of_a_run_is_one_line_and_not_too_long():
    assert printable("a\x1b[31m\n\u202eb\t\ud800") == "a?[31m??b??"
    assert cut("abcdefghij", 7) == "abcd\u2026ij"
    assert cut("abc", 3) == "abc"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (percent(0.0167), "1.67 %"),
        (percent(0.0), "0 %"),
        (percent(1.0), "100 %"),
        (percent(0.0000123), "0.00123 %"),
        (human_seconds(0.0123), "12 ms"),
        (human_seconds(61), "61 s"),
        (human_seconds(600), "10.0 min"),
        (human_seconds(8000), "2.2 h"),
        (plain_number(0.05), "0.05"),
        (plain_number(1e9), "1e+09"),
    ],
)
def test_numbers_are_for_people(found: str, expected: str):
    assert found == expected


def test_histories_for_tests_are_like_read_ones(tmp_path):
    """Hold the histories that pictures are tested with against one of a real run."""
    read = read_history(make_run(tmp_path, 3).folder)
    made = make_history(3)
    assert read.densities().shape == made.densities().shape == (3,)
    assert read.layer_densities().shape == (len(read.layers), 3)
    assert made.layer_densities().shape == (30, 3)
    assert type(read.versions[0].record) is type(made.versions[0].record)
