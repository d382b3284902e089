"""Histories of runs as a reader would find them, without the runs: any number of versions in no time."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from vllm_delta_snapshot.audit.verify_run import RunProblem
from vllm_delta_snapshot.errors import BrokenChain
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.report.history import RunHistory, VersionFacts
from vllm_delta_snapshot.report.layers import Layer
from vllm_delta_snapshot.runs.acks import Acknowledgement

RUN_ID = "0123abcd-0123-0123-0123-0123456789ab"


def make_history(
    versions: int,
    *,
    layers: int = 30,
    missing: Collection[int] = (),
    metrics: bool = True,
    acks: Mapping[str, int] | None = None,
    name: str = "model.layers.{}",
    base: str = "/models/base",
    metric: str = "reward",
    seed: int = 0,
) -> RunHistory:
    """Return the history of a run whose first steps change more than the later ones, and whose reward rises."""
    rng = np.random.default_rng(seed)
    kept = [number for number in range(1, versions + 1) if number not in missing]
    shown = tuple(Layer(name.replace("{}", str(number)), 4_000_000) for number in range(layers))
    facts = [
        _facts(number, len(shown), rng, {metric: _reward(number, versions, rng)} if metrics else {}) for number in kept
    ]
    problems = [
        RunProblem(after, BrokenChain(f"nothing leads to version {after}", expected=f"version {before + 1}"))
        for before, after in zip([0, *kept], kept, strict=False)
        if after != before + 1
    ]
    said = {
        sampler: Acknowledgement(
            run_id=RUN_ID, sampler=sampler, version=version, applied_at=0.0, pause_s=0.11, stage_s=0.8
        )
        for sampler, version in (acks or {}).items()
    }
    return RunHistory(
        RUN_ID, base, "2026-11-30T00:00:00+00:00", 8_000_000 * layers, 4_000_000 * layers, shown, facts, problems, said
    )


def _facts(number: int, layers: int, rng: np.random.Generator, metrics: Mapping[str, float]) -> VersionFacts:
    density = (0.008 + 0.02 * np.exp(-number / 5)) * rng.uniform(0.7, 1.3, layers)
    changed = (4_000_000 * density).astype(np.int64)
    record = VersionRecord(
        run_id=RUN_ID,
        version=number,
        base_version=number - 1,
        publication_id=f"{number:032x}",
        folder=f"deltas/{number:08d}-{number:08x}",
        metadata_bytes=1,
        metadata_xxh3_128="0" * 32,
        payload_bytes=int(1.4 * changed.sum()) + 1,
        changed_elements=int(changed.sum()),
        base_state_digest=f"{number - 1:016x}",
        state_digest=f"{number:016x}",
        created_at="2026-11-30T00:00:00+00:00",
    )
    seconds = rng.uniform(0.3, 0.6, 2)
    return VersionFacts(record, number, layers * 7, float(seconds[0]), float(seconds[1]) / 4, metrics, changed)


def _reward(number: int, versions: int, rng: np.random.Generator) -> float:
    return float(0.2 + 0.6 * (1 - np.exp(-3 * number / versions)) + rng.normal(0, 0.05))
