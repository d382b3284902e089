# SPDX-License-Identifier: Apache-2.0
"""A publisher's Prometheus metrics. Needs prometheus-client (extra ``[metrics]``).

By default a registry of its own: nothing of the process's default one is shown, and nothing of ours appears there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from trainer_hooks.publication.publication import PublishReport
from vllm_delta_snapshot._version import __version__
from vllm_delta_snapshot.errors import ChainError, CompatibilityError, DeltaSnapshotError, SourceError, StoreError
from vllm_delta_snapshot.util.traffic import CountedFamily, retries

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["PublishMetrics"]

_SECONDS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)
_DENSITIES: Final = (0.0001, 0.0003, 0.001, 0.003, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.3, 1.0)


class PublishMetrics:
    """A `PublishObserver`, and what Prometheus reads.

    Args:
        registry: where to put the metrics; by default a registry of their own. With ``prometheus_client.REGISTRY`` they
            are beside those that a trainer exposes already.

    Raises:
        CompatibilityError: prometheus-client is not installed.

    Example:
        >>> metrics = PublishMetrics()  # doctest: +SKIP
        >>> publisher = DeltaPublisher(model, sync_dir=sync_dir, base=base, observers=[metrics])  # doctest: +SKIP
        >>> with metrics.serve(9471):  # doctest: +SKIP
        ...     train()
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        except ImportError as error:
            raise CompatibilityError(
                "metrics need prometheus-client", hint="pip install 'vllm-delta-snapshot[metrics]'"
            ) from error
        self._registry = registry = CollectorRegistry() if registry is None else registry
        self._bytes = Counter(
            "delta_snapshot_published_bytes", "Payload of committed versions.", ["kind"], registry=registry
        )
        self._seconds = Histogram(
            "delta_snapshot_publish_duration_seconds",
            "Time of a publication by stage: diff, and write (all else until the commit).",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._blocked = Histogram(
            "delta_snapshot_publish_blocked_duration_seconds",
            "For how long a call to publish held up the training step.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._density = Histogram(
            "delta_snapshot_mutation_density_ratio",
            "Changed elements / all elements of a version.",
            buckets=_DENSITIES,
            registry=registry,
        )
        self._head = Gauge("delta_snapshot_head_version", "Newest version in the store.", registry=registry)
        self._checkpoint = Gauge(
            "delta_snapshot_checkpoint_bytes", "Bytes of a whole checkpoint, for comparison.", registry=registry
        )
        self._errors = Counter("delta_snapshot_errors", "Failed publications.", ["stage", "error"], registry=registry)
        registry.register(
            CountedFamily("delta_snapshot_retries", "Requests to the store made again.", _retries, "operation")
        )
        Gauge("delta_snapshot_build_info", "Always 1.", ["version"], registry=registry).labels(__version__).set(1)

    def published(self, report: PublishReport, step: int | None, metrics: Mapping[str, float]) -> None:
        """See `PublishObserver`."""
        self._bytes.labels("delta").inc(report.payload_bytes)
        self._seconds.labels("diff").observe(report.diff_s)
        self._seconds.labels("write").observe(max(0.0, report.total_s - report.diff_s))
        self._blocked.observe(report.blocked_s)
        self._density.observe(report.density)
        self._head.set(report.version)
        self._checkpoint.set(report.checkpoint_bytes)

    def failed(self, error: DeltaSnapshotError) -> None:
        """See `PublishObserver`."""
        self._errors.labels(_stage_of(error), type(error).__name__).inc()

    def exposition(self) -> tuple[str, bytes]:
        """Return content type and body of what Prometheus reads."""
        from prometheus_client import generate_latest
        from prometheus_client.exposition import CONTENT_TYPE_LATEST

        return CONTENT_TYPE_LATEST, generate_latest(self._registry)

    @contextlib.contextmanager
    def serve(self, port: int, *, host: str = "127.0.0.1") -> Iterator[int]:
        """Answer Prometheus over HTTP on a thread, until the context ends. Gives the port that it listens on.

        Args:
            port: where to listen; 0 for any that is free.
            host: on which address: by default only this machine reaches it.
        """
        from prometheus_client import start_http_server

        server, thread = start_http_server(port, addr=host, registry=self._registry)
        try:
            yield int(server.server_port)
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _stage_of(error: DeltaSnapshotError) -> str:
    """Return where a publication failed, by what went wrong."""
    if isinstance(error, SourceError):
        return "diff"
    if isinstance(error, ChainError):
        return "commit"
    return "write" if isinstance(error, StoreError) else "other"


def _retries() -> dict[str, float]:
    return {operation: float(count) for operation, count in retries().items()}
