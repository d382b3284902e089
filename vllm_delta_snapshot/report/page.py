# SPDX-License-Identifier: Apache-2.0
"""The report as one page: the pictures and tables of a run in a single HTML file that asks nothing of any network.

All text of a run is escaped, and pictures are images, which run nothing; the page's own policy forbids scripts and
requests besides. It follows the reader's choice of light or dark: every picture is in it twice.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np

from vllm_delta_snapshot._version import __version__
from vllm_delta_snapshot.report.history import RunHistory, VersionFacts
from vllm_delta_snapshot.report.text import counted, cut, human_bytes, human_seconds, percent, printable
from vllm_delta_snapshot.report.touched import TouchedWeights

__all__ = ["PagePicture", "page_bytes"]

_MOST_METRICS: Final = 6
_MOST_PROBLEMS: Final = 200


@dataclass(frozen=True, slots=True)
class PagePicture:
    """A picture in both themes.

    Attributes:
        alt: what it shows.
        light: an SVG.
        dark: an SVG.
    """

    alt: str
    light: bytes
    dark: bytes


def page_bytes(history: RunHistory, pictures: Iterable[PagePicture], *, touched: TouchedWeights | None = None) -> bytes:
    """Return the page as UTF-8.

    Args:
        history: the run.
        pictures: its pictures, in order.
        touched: the weights that were touched, if they were counted.
    """
    body = [
        f"<h1>Run {_text(history.run_id)}</h1>",
        f"<p class=quiet>Weight deltas published from {_text(history.base, 200)}.</p>",
        _summary(history, touched),
        _problems(history),
        *(_picture(picture) for picture in pictures),
        _acknowledgements(history),
        _versions(history),
        f"<p class=quiet>Written by vllm-delta-snapshot {escape(__version__)}.</p>",
    ]
    return _PAGE.replace("{body}", "\n".join(part for part in body if part)).encode()


def _summary(history: RunHistory, touched: TouchedWeights | None) -> str:
    rows = [
        ("versions", f"{len(history.versions):,}, newest {history.newest}"),
        ("checkpoint", f"{history.total_elements:,} weights, {human_bytes(history.checkpoint_bytes)}"),
    ]
    if history.versions:
        density = history.densities()
        sent, full = history.payload_bytes, history.checkpoint_bytes * len(history.versions)
        rows += [
            (
                "published",
                f"{history.versions[0].record.created_at[:19]} to {history.versions[-1].record.created_at[:19]}",
            ),
            ("density", f"median {percent(float(np.median(density)))}, highest {percent(float(density.max()))}"),
            (
                "bytes of all versions",
                f"{human_bytes(sent)}; as full checkpoints {human_bytes(full)}, {_ratio(full, sent)}",
            ),
        ]
    if history.anchors or history.merged or history.pruned:
        rows.append(("beside the versions", _beside(history)))
    if touched is not None and touched.versions:
        never = 1 - touched.elements[-1] / max(1, history.total_elements)
        rows.append(
            (
                "never touched",
                f"{percent(never)} of the weights, versions {touched.after + 1} to {touched.versions[-1]}",
            )
        )
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{_text(value, 300)}</td></tr>" for name, value in rows)
    return f"<table class=facts>{cells}</table>"


def _beside(history: RunHistory) -> str:
    anchors = sum(anchor.payload_bytes for anchor in history.anchors)
    merged = sum(record.payload_bytes for record in history.merged)
    parts = [f"{counted(len(history.anchors), 'anchor')}, {human_bytes(anchors)}"] if history.anchors else []
    parts += [f"{counted(len(history.merged), 'merged delta')}, {human_bytes(merged)}"] if history.merged else []
    parts += [f"deltas up to version {history.pruned} were pruned"] if history.pruned else []
    return "; ".join(parts)


def _problems(history: RunHistory) -> str:
    if not history.problems:
        return "<p class=good>The chain of records holds: every version continues the one before it.</p>"
    items = "".join(
        f"<li>version {problem.version}: {_text(str(problem.error), 600)}</li>"
        for problem in history.problems[:_MOST_PROBLEMS]
    )
    more = len(history.problems) - _MOST_PROBLEMS
    rest = f"<p>and {more:,} more</p>" if more > 0 else ""
    return f"<section class=bad><h2>The chain is broken</h2><ul>{items}</ul>{rest}</section>"


def _picture(picture: PagePicture) -> str:
    return (
        "<figure><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{_data(picture.dark)}">'
        f'<img alt="{escape(picture.alt)}" src="{_data(picture.light)}">'
        "</picture></figure>"
    )


def _data(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _acknowledgements(history: RunHistory) -> str:
    if not history.acknowledgements:
        return ""
    rows = [
        [
            name,
            str(said.version),
            human_seconds(said.pause_s),
            "" if said.stage_s is None else human_seconds(said.stage_s),
        ]
        for name, said in sorted(history.acknowledgements.items())
    ]
    return "<h2>Engines</h2>" + _table(("sampler", "serves version", "pause", "fetch and stage"), rows)


def _versions(history: RunHistory) -> str:
    if not history.versions:
        return "<p>No version was published yet.</p>"
    metrics = history.metric_names()[:_MOST_METRICS]
    head = ("version", "from", "step", "changed weights", "density", "bytes", "of full", "diff", "encode, upload")
    rows = [_version_row(history, facts, metrics) for facts in history.versions]
    table = _table((*head, *metrics), rows)
    is_open = " open" if len(rows) <= 50 else ""
    return f"<details{is_open}><summary>All {len(rows):,} versions</summary>{table}</details>"


def _version_row(history: RunHistory, facts: VersionFacts, metrics: Sequence[str]) -> list[str]:
    record = facts.record
    return [
        str(record.version),
        str(record.base_version),
        "" if facts.step is None else str(facts.step),
        f"{record.changed_elements:,}",
        percent(record.changed_elements / max(1, history.total_elements)),
        human_bytes(record.payload_bytes),
        percent(record.payload_bytes / max(1, history.checkpoint_bytes)),
        "" if facts.diff_s is None else human_seconds(facts.diff_s),
        "" if facts.upload_s is None else human_seconds(facts.upload_s),
        *("" if name not in facts.metrics else f"{facts.metrics[name]:.4g}" for name in metrics),
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f"<th>{_text(name, 40)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{_text(cell, 60)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<div class=wide><table><thead><tr>{titles}</tr></thead><tbody>\n{lines}</tbody></table></div>"


def _text(value: str, most: int = 120) -> str:
    return escape(cut(printable(value), most))


def _ratio(full: int, sent: int) -> str:
    return f"{full / max(1, sent):,.1f} times as much"


_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Weight deltas of a run</title>
<style>
:root { --paper: #ffffff; --ink: #1c1f23; --faint: #5b6470; --line: #dfe3e8;
        --good: #1f7a4d; --bad: #a3261b; --tint: #fbeceb }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --ink: #e6e9ee; --faint: #9aa4b1; --line: #2c333c;
          --good: #63c493; --bad: #ff8f84; --tint: #33201e }
}
body { margin: 0 auto; padding: 1.5rem; max-width: 62rem; background: var(--paper); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.3rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem }
.quiet { color: var(--faint); overflow-wrap: anywhere } .good { color: var(--good) }
.bad { border-left: 4px solid var(--bad); background: var(--tint); padding: .3rem 1rem; overflow-wrap: anywhere }
.bad h2 { color: var(--bad) }
figure { margin: 1.8rem 0 } img { width: 100%; height: auto; display: block }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
.facts th { text-align: left; font-weight: 600 } .facts td { text-align: left; white-space: normal }
summary { cursor: pointer; font-weight: 600; margin: 1rem 0 }
</style>
</head>
<body>
{body}
</body>
</html>
"""
