# SPDX-License-Identifier: Apache-2.0
"""google-cloud-storage's client, set up for buckets of ours; and its errors in our words."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from vllm_delta_snapshot.errors import (
    CompatibilityError,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)
from vllm_delta_snapshot.store.bucket import PastTheEnd
from vllm_delta_snapshot.store.config import StoreConfig
from vllm_delta_snapshot.traffic import count_retry

__all__ = ["make_client", "make_retry", "reported"]


def make_client(config: StoreConfig, where: str) -> Any:
    """Return a client of GCS. Makes no request to the bucket. It may be used from several threads.

    Raises:
        CompatibilityError: google-cloud-storage is not installed.
        StoreError: there are no credentials.
    """
    try:
        import google.auth.exceptions
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage
    except ImportError as error:
        raise CompatibilityError(
            "gs:// needs google-cloud-storage", found=error, hint="pip install 'vllm-delta-snapshot[gcs]'"
        ) from error
    # Else every client asks for the bucket's metadata behind our back, to label traces: a right that nobody needs here,
    # and a thread that goes on asking for two minutes where no answer comes.
    os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
    options = {"api_endpoint": config.endpoint_url} if config.endpoint_url else None
    try:
        if config.anonymous:
            return storage.Client(project="none", credentials=AnonymousCredentials(), client_options=options)
        return storage.Client(client_options=options)
    except (google.auth.exceptions.GoogleAuthError, OSError, ValueError) as error:
        raise StoreError(
            "no credentials for GCS",
            file=where,
            found=_brief(error),
            hint="Set them up as for gcloud (gcloud auth application-default login), and try that.",
        ) from error


def make_retry(config: StoreConfig) -> Any:
    """Return how requests are made again: with back-off and jitter, for as long as some attempts may last."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    retry = DEFAULT_RETRY.with_timeout(config.attempts * (config.connect_timeout_s + config.read_timeout_s) / 4)
    # The library does not say of which operation; it is told of every failure that may pass, the last one too.
    retry._on_error = lambda _: count_retry("request")
    return retry


@contextlib.contextmanager
def reported(where: str, bucket: str, bucket_exists: Callable[[], bool]) -> Iterator[None]:
    """Turn the library's errors into ours.

    Args:
        where: the object, for messages.
        bucket: its bucket.
        bucket_exists: asked when an answer leaves open what is missing.

    Raises:
        PastTheEnd: a range begins after the end of an object.
    """
    import google.api_core.exceptions as api
    import google.auth.exceptions as auth
    import requests
    import urllib3.exceptions

    try:
        yield
    except api.PreconditionFailed as error:
        raise ObjectExists("object exists", file=where) from error
    except api.NotFound as error:
        said = str(error)
        if "bucket does not exist" in said or ("No such object" not in said and not bucket_exists()):
            hint = "Make it, or correct sync_dir."
            raise StoreError("there is no such bucket", file=where, found=bucket, hint=hint) from error
        raise ObjectNotFound("no such object", file=where) from error
    except api.RequestRangeNotSatisfiable as error:
        raise PastTheEnd from error
    except (api.Unauthorized, api.Forbidden, auth.RefreshError, auth.DefaultCredentialsError) as error:
        hint = "Look at the credentials and the bucket's policy: see docs/stores.md."
        raise StoreError("GCS refuses", file=where, found=_brief(error), hint=hint) from error
    except (api.ServerError, api.TooManyRequests, api.RetryError, api.Conflict, auth.TransportError) as error:
        raise StoreUnavailable("GCS is busy", file=where, found=_brief(error)) from error
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreUnavailable("GCS does not answer", file=where, found=_brief(error)) from error
    except api.GoogleAPICallError as error:
        raise StoreError("GCS refuses", file=where, found=_brief(error), hint="See docs/stores.md.") from error
    except Exception as error:
        if type(error).__module__.startswith(("google.resumable_media", "google.cloud.storage")):
            raise StoreUnavailable("an answer of GCS is wrong", file=where, found=_brief(error)) from error
        raise


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."
