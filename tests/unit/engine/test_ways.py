"""The summary of ways that a worker logs."""

from vllm_delta_snapshot.engine.ways import Choice, summary_of, table_of

CHOICES = {
    "a": Choice("scatter"),
    "b": Choice("skip", "the engine does not load it"),
    "c": Choice("scatter"),
    "d": Choice("reload", "mlp (Fp8)"),
    "e": Choice("skip", "it is converted"),
    "f": Choice("scatter"),
    "g": Choice("skip", "the engine does not load it"),
}


def test_summary_counts_the_ways_that_there_are() -> None:
    assert summary_of(CHOICES) == "scatter=3 reload=1 skip=3"


def test_summary_of_nothing_is_empty() -> None:
    assert summary_of({}) == ""


def test_table_has_a_row_for_each_way_and_reason_the_most_frequent_first() -> None:
    rows = table_of(CHOICES)
    assert rows[:2] == [("scatter", "", 3, "a"), ("skip", "the engine does not load it", 2, "b")]
    assert sorted(rows[2:]) == [("reload", "mlp (Fp8)", 1, "d"), ("skip", "it is converted", 1, "e")]
    assert table_of({}) == []
