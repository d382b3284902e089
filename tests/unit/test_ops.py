"""The dashboard and the alert rules: every metric that they ask for is one that followers or publishers export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from trainer_hooks import PublishMetrics
from vllm_delta_snapshot.drive.follow_metrics import FollowMetrics

ROOT = Path(__file__).parents[2]
LABELS = {"job", "instance", "le"}  # of Prometheus itself, beside those of the metrics


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Return the names of all samples, with the names of their labels."""
    found: dict[str, set[str]] = {}
    for metrics in (FollowMetrics(), PublishMetrics()):
        for collector in metrics._registry._collector_to_names:
            for family in collector.describe():
                endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}[
                    family.type
                ]
                for ending in endings:
                    found.setdefault(family.name + ending, set()).update(collector._labelnames)
    return found


def dashboard() -> dict:
    return json.loads((ROOT / "ops" / "grafana-dashboard.json").read_text())


def rules() -> list[dict]:
    (group,) = yaml.safe_load((ROOT / "ops" / "alerts.yaml").read_text())["groups"]
    return group["rules"]


def expressions() -> Iterator[tuple[str, str]]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


ALL = list(expressions())


def test_there_are_expressions_and_metrics(exported: dict[str, set[str]]):
    assert len(ALL) > 20
    assert exported["delta_snapshot_errors_total"] == {"stage", "error"}
    assert exported["delta_snapshot_retries_total"] == {"operation"}
    assert "delta_snapshot_pause_duration_seconds_bucket" in exported


@pytest.mark.parametrize(("where", "expression"), ALL, ids=[f"{where}-{place}" for place, (where, _) in enumerate(ALL)])
def test_expression_asks_for_what_is_exported(where: str, expression: str, exported: dict[str, set[str]]):
    names = re.findall(r"delta_snapshot_\w+", expression)
    assert names
    assert [name for name in names if name not in exported] == []
    known = LABELS.union(*(exported[name] for name in names))
    asked = re.findall(r"(\w+)\s*(?:=~|!=|=)\s*\"", expression)
    asked += [label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")]
    assert [label for label in asked if label not in known] == []


def test_every_metric_is_on_the_dashboard(exported: dict[str, set[str]]):
    shown = " ".join(expression for _, expression in ALL)
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported}
    assert [stem for stem in sorted(stems) if stem not in shown] == []


def test_panels_do_not_lie_on_each_other():
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_alerts_are_explained():
    docs = (ROOT / "docs" / "observability.md").read_text()
    for rule in rules():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert {"summary", "description"} == set(rule["annotations"])
        assert f"`{rule['alert']}`" in docs


def test_pictures_that_the_guide_shows_are_there_and_are_what_plot_draws():
    shown = re.findall(r"\]\((images/[^)]+)\)", (ROOT / "docs" / "observability.md").read_text())
    names = ["density", "layers", "bytes", "times", "touched"]
    assert shown == [f"images/run/{name}.png" for name in names]
    for path in shown:
        assert (ROOT / "docs" / path).read_bytes().startswith(b"\x89PNG\r\n")
