# SPDX-License-Identifier: Apache-2.0
"""Plan: how long a version will take from the trainer to the engines, by coefficients that a benchmark measured.

A model of plain sums, stage after stage, for sizing a set-up before there is one. It knows nothing of overlaps,
retries, other traffic or faster machines. `make bench-link` measures the coefficients, and prints what the plan says
beside what it measured.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise

from vllm_delta_snapshot.errors import CorruptFile

__all__ = ["Coefficients", "Plan", "Setup", "measured_coefficients", "plan"]


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What one core or one worker of the measured machine needs.

    Attributes:
        diff_s_per_element: to compare one element, on all of the trainer's threads together.
        encode_s_per_change: to digest, encode and write one change, the same.
        publish_s: for every publication: files, fsync, the commit.
        decode_s_per_change: for the stager to decode and check one change.
        map_s_per_change: for the stager to map one change for one worker and write it to the stage folder.
        prepare_s_per_change: for a worker to gather and prove one change; generation stands still for that long.
        pause_s_per_change: for a worker to write one change and read it back, in the pause.
        pause_s: for every pause, whatever changed.
        bytes_per_change: pairs of density and bytes per changed bf16 weight, by rising density.
        machine: what they were measured on.
    """

    diff_s_per_element: float
    encode_s_per_change: float
    publish_s: float
    decode_s_per_change: float
    map_s_per_change: float
    prepare_s_per_change: float
    pause_s_per_change: float
    pause_s: float
    bytes_per_change: tuple[tuple[float, float], ...]
    machine: str

    def bytes_at(self, density: float) -> float:
        """Return the bytes per change at a density: between measured ones by the logarithm, beyond them the nearest."""
        table = self.bytes_per_change
        for (low, first), (high, last) in pairwise(table):
            if low <= density <= high:
                share = math.log(density / low) / math.log(high / low)
                return first + share * (last - first)
        return table[0][1] if density < table[0][0] else table[-1][1]


@dataclass(frozen=True, slots=True)
class Setup:
    """What is to be planned.

    Attributes:
        params: parameters of the model, in bf16.
        density: the share that changes per version.
        gbps: the link between trainer and store, and between store and each host, in Gbit/s.
        engines: how many engines, each on a host of its own.
        store_gbps: what the store gives to all hosts together; ``None``: the sum of their links.
        ranks: trainer processes that share the diff.
        workers: workers of an engine, that share the weights (tensor and expert parallel).
    """

    params: float
    density: float
    gbps: float
    engines: int = 1
    store_gbps: float | None = None
    ranks: int = 1
    workers: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What is predicted.

    Attributes:
        payload_bytes: what travels of a version.
        checkpoint_bytes: what a full checkpoint would be.
        seconds: by stage, in their order.
        bottleneck: the longest stage.
        total_s: all of them, one after the other: from the step's end to served weights.
        pause_s: how long generation is paused.
        checkpoint_s: what sending full checkpoints would take on the same links alone.
    """

    payload_bytes: float
    checkpoint_bytes: float
    seconds: dict[str, float]
    bottleneck: str
    total_s: float
    pause_s: float
    checkpoint_s: float


def plan(setup: Setup, coefficients: Coefficients) -> Plan:
    """Predict one version of a set-up."""
    c = coefficients
    changes = setup.params * setup.density
    payload = changes * c.bytes_at(setup.density)
    checkpoint = 2.0 * setup.params
    of_rank, of_worker = changes / setup.ranks, changes / setup.workers
    seconds = {
        "diff": c.publish_s + setup.params / setup.ranks * c.diff_s_per_element,
        "encode": of_rank * c.encode_s_per_change,
        "upload": 8 * payload / (1e9 * setup.gbps),
        "fetch": _fetch_s(payload, setup),
        "stage": changes * c.decode_s_per_change + of_worker * setup.workers * c.map_s_per_change,
        "prepare": of_worker * c.prepare_s_per_change,
        "pause": c.pause_s + of_worker * c.pause_s_per_change,
    }
    return Plan(
        payload_bytes=payload,
        checkpoint_bytes=checkpoint,
        seconds=seconds,
        bottleneck=max(seconds, key=lambda stage: seconds[stage]),
        total_s=sum(seconds.values()),
        pause_s=seconds["pause"],
        checkpoint_s=8 * checkpoint / (1e9 * setup.gbps) + _fetch_s(checkpoint, setup),
    )


def measured_coefficients() -> Coefficients:
    """Return the coefficients that the last `make bench-link` of this project measured.

    Raises:
        CorruptFile: the installed package is damaged.
    """
    path = files("vllm_delta_snapshot") / "coefficients.json"
    try:
        fields = json.loads(path.read_text())
        table = tuple((float(density), float(size)) for density, size in fields.pop("bytes_per_change"))
        return Coefficients(bytes_per_change=table, **fields)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CorruptFile("the measured coefficients cannot be read", file=str(path), found=error) from error


def _fetch_s(num_bytes: float, setup: Setup) -> float:
    own = 8 * num_bytes / (1e9 * setup.gbps)
    if setup.store_gbps is None:
        return own
    return max(own, 8 * num_bytes * setup.engines / (1e9 * setup.store_gbps))
