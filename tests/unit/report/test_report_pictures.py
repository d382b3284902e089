"""Pictures and the page: honest axes, few marks whatever the number of versions, and no way in for a run's own text."""

from __future__ import annotations

import csv
import io
import itertools
import re
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.support.histories import make_history
from vllm_delta_snapshot.audit.verify_run import RunProblem
from vllm_delta_snapshot.errors import CorruptFile, ObjectNotFound, StageError
from vllm_delta_snapshot.report.figures import LIGHT, draw_pictures
from vllm_delta_snapshot.report.figures.style import themed
from vllm_delta_snapshot.report.history import RunHistory
from vllm_delta_snapshot.report.page import PagePicture, page_bytes
from vllm_delta_snapshot.report.tables import csv_bytes, layer_rows, touched_rows, version_rows
from vllm_delta_snapshot.report.touched import TouchedWeights
from vllm_delta_snapshot.report.write import choose_metrics, write_page, write_pictures

NAMES = ["density", "layers", "bytes", "times", "touched"]
HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&$\\frac{1}{0}$\x1b[31m\n\u202e"


def touched_of(history: RunHistory) -> TouchedWeights:
    versions = [facts.version for facts in history.versions]
    return TouchedWeights(versions, [1000 * version for version in versions])


def draw(history: RunHistory, metrics: tuple[str, ...] = ("reward",)) -> dict[str, Figure]:
    with themed(LIGHT):
        pictures = draw_pictures(history, LIGHT, metrics=metrics, touched=touched_of(history))
        return {picture.name: picture.figure for picture in pictures}


def panels(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def subtitle(axes: Axes) -> str:
    return axes.texts[-1].get_text()


@pytest.fixture(scope="module")
def many() -> dict[str, Figure]:
    return draw(make_history(5000, missing=range(2000, 2100), acks={"a": 5000}))


def test_bars_begin_at_zero_and_have_their_numbers():
    history = make_history(5, missing=[3], acks={"a": 4, "b": 5})
    figures = draw(history)
    assert list(figures) == NAMES
    upper, lower = panels(figures["density"])
    assert upper.get_ylim()[0] == 0
    heights = [bar.get_height() for bar in upper.patches[:4]]
    assert heights == pytest.approx((100 * history.densities()).tolist())
    assert {text.get_text() for text in upper.texts} >= {f"{height:#.3g}" for height in heights}
    assert [line.get_ydata().size for line in lower.lines] == [5]  # with a hole where version 3 is missing
    (times,) = panels(figures["times"])
    assert times.get_ylim()[0] == 0
    assert [text.get_text() for text in times.get_legend().get_texts()] == [
        "diff", "encode and upload", "fetch and stage", "pause"
    ]  # fmt: skip
    assert "the 2 versions that they acknowledged last" in subtitle(times)


def test_bytes_are_on_a_scale_that_says_it_is_log_and_shows_a_full_checkpoint():
    history = make_history(5)
    (axes,) = panels(draw(history)["bytes"])
    assert (axes.get_yscale(), "log scale" in axes.get_ylabel()) == ("log", True)
    low, high = axes.get_ylim()
    assert low < min(facts.record.payload_bytes for facts in history.versions)
    assert high > history.checkpoint_bytes
    assert any("full checkpoint" in text.get_text() for text in axes.texts)


def test_a_single_version_makes_all_pictures():
    figures = draw(make_history(1))
    assert list(figures) == NAMES
    (bar,) = panels(figures["density"])[0].patches
    left, right = panels(figures["density"])[0].get_xlim()
    assert bar.get_width() < (right - left) / 3


def test_no_version_makes_no_picture():
    assert draw(make_history(0), ()) == {}


def test_many_versions_make_few_marks_and_say_so(many: dict[str, Figure]):
    density, reward = panels(many["density"])
    for axes in (density, reward):
        assert axes.lines[0].get_ydata().size < 420
        assert "mean of 13 versions" in subtitle(axes)
    assert density.get_ylim()[0] == 0
    assert density.get_ylim()[1] > 100 * make_history(5000).densities().max()  # the spike of the first step is in it
    (times,) = panels(many["times"])
    assert len(times.patches) < 220
    assert "a bar is the mean of 49 versions" in subtitle(times)
    mesh = panels(many["layers"])[0].collections[0]
    assert mesh.get_array().shape[0] == 30
    assert mesh.get_array().shape[1] < 420
    assert "a column is the mean of 13 versions" in subtitle(panels(many["layers"])[0])


def test_missing_versions_are_grey_and_break_lines(many: dict[str, Figure]):
    line = panels(many["bytes"])[0].lines[0]
    (hole,) = np.flatnonzero(np.isnan(line.get_ydata()))
    assert 1999 <= line.get_xdata()[hole] <= 2100
    values = panels(many["layers"])[0].collections[0].get_array()
    assert int(np.ma.getmaskarray(values).all(axis=0).sum()) == 1
    assert "grey: missing" in subtitle(panels(many["layers"])[0])


def test_density_that_is_uneven_is_on_a_log_scale_that_says_so():
    history = make_history(60)
    for facts in history.versions[1:]:
        object.__setattr__(facts, "changed_by_layer", facts.changed_by_layer // 1000)
        record = facts.record.model_copy(update={"changed_elements": facts.record.changed_elements // 1000})
        object.__setattr__(facts, "record", record)
    figures = draw(history)
    density = panels(figures["density"])[0]
    assert (density.get_yscale(), "log scale" in density.get_ylabel()) == ("log", True)
    assert "log scale" in subtitle(panels(figures["layers"])[0])


def test_many_layers_share_rows_and_say_so():
    (axes, *_) = panels(draw(make_history(3, layers=300))["layers"])
    assert axes.collections[0].get_array().shape[0] == 100
    assert "a row is the mean of 3 layers" in subtitle(axes)


def test_files_are_pictures_in_two_forms_and_numbers(tmp_path: Path):
    drawn: list[str] = []
    out = tmp_path / "new" / "out"
    written = write_pictures(make_history(2, layers=1), out, metrics=[], progress=drawn.append)
    assert drawn == NAMES[:4]
    pictures = [out / f"{name}.{form}" for name in drawn for form in ("png", "svg")]
    assert written == [out / "versions.csv", out / "layers.csv", *pictures]
    assert sorted(out.iterdir()) == sorted(written)
    for path in pictures:
        begins = b"\x89PNG\r\n" if path.suffix == ".png" else b"<?xml"
        assert path.read_bytes().startswith(begins)


def test_place_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StageError, match="cannot be written"):
        write_pictures(make_history(0), tmp_path / "file", metrics=[])
    with pytest.raises(StageError, match="cannot be written"):
        write_page(make_history(0), tmp_path, metrics=[])
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


# --- metrics


def test_reward_is_shown_if_there_is_one_or_else_what_most_versions_have():
    history = make_history(3)
    assert choose_metrics(history, []) == ["reward"]
    for facts, more in zip(history.versions, [{"loss": 1.0}, {"loss": 1.0, "reward/mean": 2.0}, {}], strict=True):
        object.__setattr__(facts, "metrics", more)
    assert choose_metrics(history, []) == ["reward/mean"]
    object.__setattr__(history.versions[1], "metrics", {"loss": 1.0, "kl": 0.0})
    assert choose_metrics(history, []) == ["loss"]
    assert choose_metrics(history, ["kl", "loss", "kl"]) == ["kl", "loss"]
    assert choose_metrics(make_history(3, metrics=False), []) == []


def test_metric_that_nobody_recorded_is_an_error_that_says_which_there_are():
    with pytest.raises(ObjectNotFound, match="expected reward, found loss"):
        choose_metrics(make_history(3), ["loss"])


# --- tables


def rows_of(data: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(data.decode())))


def test_tables_have_every_version_and_layer_unbinned():
    history = make_history(500, acks={"a": 500})
    head, *rows = rows_of(csv_bytes(version_rows(history)))
    assert len(rows) == 500
    last = dict(zip(head, rows[-1], strict=True))
    assert (last["version"], last["pause_s"], last["stage_s"]) == ("500", "0.11", "0.8")
    assert float(last["density"]) == history.densities()[-1]
    assert float(last["metric reward"]) == history.versions[-1].metrics["reward"]
    assert dict(zip(head, rows[0], strict=True))["pause_s"] == ""
    head, *rows = rows_of(csv_bytes(layer_rows(history)))
    assert len(rows) == 500 * 30
    assert rows[31] == ["2", "model.layers.1", str(history.versions[1].changed_by_layer[1]), "4000000", rows[31][4]]
    head, *rows = rows_of(csv_bytes(touched_rows(history, touched_of(history))))
    assert [float(row[3]) for row in rows] == [1 - 1000 * n / 120_000_000 for n in range(1, 501)]


def test_text_in_tables_is_no_formula():
    history = make_history(1, layers=1, name='=HYPERLINK("http://x")')
    assert rows_of(csv_bytes(layer_rows(history)))[1][1] == '\'=HYPERLINK("http://x")'


# --- the page


class Seen(HTMLParser):
    """What a browser would make of a page: elements, their attributes, text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_escapes_all_text_of_a_run_and_asks_nothing_of_any_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # The first two pictures have all text of a run that pictures have, and every one takes its time.
    monkeypatch.setattr(
        "vllm_delta_snapshot.report.write.draw_pictures", lambda *args, **more: islice(draw_pictures(*args, **more), 2)
    )
    history = make_history(2, layers=1, name=HOSTILE + "{}", base=HOSTILE, metric=HOSTILE, acks={"a": 2})
    object.__setattr__(history, "problems", [RunProblem(2, CorruptFile(HOSTILE, tensor=HOSTILE))])
    drawn: list[str] = []
    page = write_page(history, tmp_path / "page.html", metrics=[HOSTILE], progress=drawn.append).read_text()
    assert drawn == 2 * NAMES[:2]
    seen = Seen(page)
    names = {name for name, _ in seen.elements}
    assert names <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td",
        "section", "ul", "li", "figure", "picture", "source", "img", "div", "details", "summary",
    }  # fmt: skip
    for _, attributes in seen.elements:
        assert not any(name.startswith("on") for name in attributes)
        for key in ("src", "srcset", "href"):
            assert re.match(r"data:image/svg\+xml;base64,|$", attributes.get(key) or "")
    assert seen.text.count("<script>alert(1)</script>") >= 3  # it is there to be read
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"url\(|@import|https?:", re.sub(r"base64,[A-Za-z0-9+/=]+", "", page))


def test_page_has_a_table_of_all_versions_and_both_themes():
    history = make_history(300)
    page = page_bytes(history, [PagePicture("what it shows", b"<svg/>", b"<svg />")]).decode()
    seen = Seen(page)
    assert sum(name == "tr" for name, _ in seen.elements) == 300 + 1 + 5
    assert [a["media"] for name, a in seen.elements if name == "source"] == ["(prefers-color-scheme: dark)"]
    assert [a["alt"] for name, a in seen.elements if name == "img"] == ["what it shows"]
    assert "The chain of records holds" in page


def test_page_says_that_the_chain_is_broken_or_that_there_is_nothing():
    assert "The chain is broken" in page_bytes(make_history(3, missing=[2]), []).decode()
    assert "No version was published yet" in page_bytes(make_history(0), []).decode()


@pytest.mark.parametrize("count", [1, 2, 60, 2000])
@pytest.mark.parametrize(
    "values",
    [(1e308, 1e308), (1e308, -1e308), (1.7976931348623157e308, 0.0), (5e-324, 0.0), (5e-324, 5e-324), (1e308, 5e-324)],
    ids=str,
)
def test_any_finite_metric_is_drawn(count: int, values: tuple[float, float], tmp_path: Path):
    history = make_history(count, layers=1)
    for facts, value in zip(history.versions, itertools.cycle(values)):
        object.__setattr__(facts, "metrics", {"reward": value})
    (tmp_path / "out").mkdir()
    written = write_pictures(history, tmp_path / "out", metrics=["reward"])  # warnings are errors
    assert written
    write_page(history, tmp_path / "page.html", metrics=["reward"])
