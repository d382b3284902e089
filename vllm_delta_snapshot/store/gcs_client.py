# SPDX-License-Identifier: Apache-2.0
"""google-cloud-storage's client, set up for buckets of ours; and its errors in our words.

What is set up for the library holds: STORAGE_EMULATOR_HOST, credentials, universe, unless a setting of ours is given.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_delta_snapshot.errors import CompatibilityError, StoreError, StoreUnavailable
from vllm_delta_snapshot.store.config import StoreConfig
from vllm_delta_snapshot.util.traffic import count_retry

if TYPE_CHECKING:
    from vllm_delta_snapshot.store.gcs_answers import Operation

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

        from vllm_delta_snapshot.store.gcs_answers import brief, check_answer
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
            client = storage.Client(project="none", credentials=AnonymousCredentials(), client_options=options)
        else:
            client = storage.Client(client_options=options)
    except (google.auth.exceptions.GoogleAuthError, OSError, ValueError) as error:
        raise StoreError(
            "no credentials for GCS",
            file=where,
            found=brief(error),
            hint="Set them up as for gcloud (gcloud auth application-default login), and try that.",
        ) from error
    client._http.hooks["response"].append(check_answer)
    return client


def make_retry(config: StoreConfig, on_retry: Callable[[], None] = lambda: None) -> Any:
    """Return how requests are made again: with back-off and jitter, for as long as some attempts may last.

    Args:
        config: how long.
        on_retry: told of every failure that may pass, the last one too.
    """
    from google.api_core.exceptions import Conflict
    from google.cloud.storage.exceptions import InvalidResponse
    from google.cloud.storage.retry import DEFAULT_RETRY

    def may_pass(error: Exception) -> bool:
        # The library does not know 409, with which GCS says that another request for the same was under way.
        status = error.response.status_code if isinstance(error, InvalidResponse) else 0
        return isinstance(error, Conflict) or status == 409 or bool(DEFAULT_RETRY._predicate(error))

    def count(_: Exception) -> None:
        count_retry("request")  # the library does not say of which operation
        on_retry()

    seconds = config.attempts * (config.connect_timeout_s + config.read_timeout_s) / 4
    retry = DEFAULT_RETRY.with_predicate(may_pass).with_timeout(seconds)
    retry._on_error = count
    return retry


@contextlib.contextmanager
def reported(where: str, bucket: str, operation: Operation, bucket_exists: Callable[[], bool]) -> Iterator[None]:
    """Turn the library's errors into ours.

    Args:
        where: the object, for messages.
        bucket: its bucket.
        operation: what is asked, and so which right it needs.
        bucket_exists: asked when an answer leaves open what is missing.

    Raises:
        PastTheEnd: a range begins after the end of an object.
    """
    import google.api_core.exceptions as api
    import google.auth.exceptions as auth
    import requests
    import urllib3.exceptions
    from google.cloud.storage.exceptions import InvalidResponse

    from vllm_delta_snapshot.store.gcs_answers import StrayAnswer, brief, error_of_answer, error_of_credentials

    try:
        yield
    except StoreError as error:
        raise error if error.file else error.placed(file=where, hint="") from error
    except api.RetryError as error:  # of all tries the last says why
        cause = error.cause
        if isinstance(cause, InvalidResponse):
            cause = api.from_http_status(cause.response.status_code, cause.response.text, response=cause.response)
        if isinstance(cause, StrayAnswer):
            raise _stray(where, cause) from error
        if isinstance(cause, api.GoogleAPICallError):
            raise error_of_answer(cause, operation, where, bucket, bucket_exists) from error
        raise StoreUnavailable("GCS does not answer", file=where, found=brief(cause or error)) from error
    except api.GoogleAPICallError as error:
        raise error_of_answer(error, operation, where, bucket, bucket_exists) from error
    except StrayAnswer as error:
        raise _stray(where, error) from error
    except auth.TransportError as error:
        raise StoreUnavailable("Google's servers for credentials do not answer", file=where, found=error) from error
    except auth.GoogleAuthError as error:
        raise error_of_credentials(error, where) from error
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        raise StoreUnavailable("GCS does not answer", file=where, found=brief(error)) from error
    except Exception as error:
        if type(error).__module__.startswith(("google.resumable_media", "google.cloud.storage")):
            raise StoreUnavailable("an answer of GCS is wrong", file=where, found=brief(error)) from error
        raise


def _stray(where: str, error: Exception) -> StoreUnavailable:
    return StoreUnavailable(
        "what answered is not GCS",
        file=where,
        found=error,
        hint="Look at proxies (HTTPS_PROXY) and DELTA_SNAPSHOT_STORE_ENDPOINT_URL: does curl get the same?",
    )
