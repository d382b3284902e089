# SPDX-License-Identifier: Apache-2.0
"""A follower's Prometheus metrics. Needs prometheus-client (extra ``[metrics]``), which is beside every vLLM.

A registry of its own: nothing of the process's default one is shown, and nothing of ours appears there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from vllm_delta_snapshot._version import __version__
from vllm_delta_snapshot.drive.follow import Follower, Stage
from vllm_delta_snapshot.drive.sync import UpdateReport
from vllm_delta_snapshot.errors import CompatibilityError, DeltaSnapshotError
from vllm_delta_snapshot.host.area import StagerState, stagers_of
from vllm_delta_snapshot.util.traffic import CountedFamily, retries

__all__ = ["FollowMetrics"]

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class FollowMetrics:
    """An `Observer`, and what Prometheus reads.

    Raises:
        CompatibilityError: prometheus-client is not installed.
    """

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, Histogram
            from prometheus_client import Counter as PrometheusCounter
        except ImportError as error:
            raise CompatibilityError(
                "metrics need prometheus-client", hint="pip install 'vllm-delta-snapshot[metrics]'"
            ) from error
        self._registry = registry = CollectorRegistry()

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"delta_snapshot_{name}", what, registry=registry)

        def counter(name: str, what: str, labels: Sequence[str] = ()) -> PrometheusCounter:
            return PrometheusCounter(f"delta_snapshot_{name}", what, labels, registry=registry)

        def seconds(name: str, what: str) -> Histogram:
            return Histogram(f"delta_snapshot_{name}_duration_seconds", what, buckets=_SECONDS, registry=registry)

        self._applied = gauge("applied_version", "Version that the server serves; -1 while unknown.")
        self._head = gauge("head_version", "Newest version in the store.")
        self._lag = gauge("lag_versions", "Versions that the server is behind; -1 while unknown.")
        self._ready = gauge("ready", "1 if the server has caught up.")
        self._stage = seconds("stage", "From finding a version until the server had it staged and checked.")
        self._apply = seconds("apply", "Writing the weights, inside the pause.")
        self._pause = seconds("pause", "From the call to pause to the end of the call to resume.")
        self._updates = counter("updates", "Versions taken.")
        self._repairs = counter("repairs", "Servers found to serve other weights.")
        self._errors = counter("errors", "Failed tries.", ["stage", "error"])
        self._chain = gauge("chain_length", "Deltas that an engine that starts now has to fetch; -1 while unknown.")
        self._stagers: Callable[[], list[StagerState]] = list
        registry.register(
            CountedFamily("delta_snapshot_fetched_bytes", "Payload that the host's stager fetched.", self._fetched)
        )
        registry.register(
            CountedFamily(
                "delta_snapshot_retries", "Tries after the first, here and in the stager.", self._retries, "operation"
            )
        )
        Gauge("delta_snapshot_build_info", "Always 1.", ["version"], registry=registry).labels(__version__).set(1)

    def watch(self, follower: Follower) -> None:
        """Show the state of a follower, as it is when it is asked for."""

        def known(value: int | None) -> float:
            return -1.0 if value is None else float(value)

        self._stagers = lambda: stagers_of(follower.config.sync_dir)
        self._chain.set_function(lambda: known(follower.state.chain_length))
        self._applied.set_function(lambda: known(follower.state.applied))
        self._head.set_function(lambda: float(follower.state.newest))
        self._lag.set_function(lambda: known(follower.state.lag))
        self._ready.set_function(lambda: float(follower.is_ready))

    def updated(self, report: UpdateReport) -> None:
        """See `Observer`."""
        self._updates.inc()
        self._repairs.inc(report.is_repaired)
        self._stage.observe(report.stage_s)
        self._apply.observe(report.apply_s)
        self._pause.observe(report.pause_s)

    def failed(self, error: DeltaSnapshotError, stage: Stage) -> None:
        """See `Observer`."""
        kind = getattr(error, "kind", None) or type(error)
        self._errors.labels(stage, kind.__name__).inc()

    def _fetched(self) -> dict[str, float]:
        return {"": float(sum(state.fetched_bytes for state in self._stagers()))}

    def _retries(self) -> dict[str, float]:
        found = Counter(retries())
        for state in self._stagers():
            found.update(state.retries)
        return {operation: float(count) for operation, count in found.items()}

    def exposition(self) -> tuple[str, bytes]:
        """Return content type and body of what Prometheus reads."""
        from prometheus_client import generate_latest
        from prometheus_client.exposition import CONTENT_TYPE_LATEST

        return CONTENT_TYPE_LATEST, generate_latest(self._registry)
