# SPDX-License-Identifier: Apache-2.0
"""Keep "not staged yet" out of the logs.

vLLM's routes can say "no" only by an exception, which the worker, the engine core and the API server each log with a
full traceback. A driver that asks whether a version is staged would fill the logs with an answer that is no error; so
these records, and no others, are dropped. The asker still gets the answer.
"""

from __future__ import annotations

import logging
from typing import Final

from vllm_delta_snapshot.errors import NotStaged, error_kind

__all__ = ["quiet_not_staged"]

_LOGGERS: Final = (
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.engine.core",
    "uvicorn.error",
)


class _DropNotStaged(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return error_kind(f"{record.getMessage()} {error or ''}") is not NotStaged


def quiet_not_staged() -> None:
    """Install the filter in this process. Does nothing twice."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, _DropNotStaged) for known in logger.filters):
            logger.addFilter(_DropNotStaged())
