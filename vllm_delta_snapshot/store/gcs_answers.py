# SPDX-License-Identifier: Apache-2.0
"""What GCS says went wrong, in our words: each answer by what its user has to do, never by its status alone.

And what is no answer of GCS, though its status says that all is well: a page to log in at, a whole object where a part
was asked for, bytes that somebody compressed on their way.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal

from vllm_delta_snapshot.errors import ObjectExists, ObjectNotFound, StoreError, StoreUnavailable
from vllm_delta_snapshot.store.bucket import PastTheEnd

__all__ = ["Operation", "StrayAnswer", "brief", "check_answer", "error_of_answer", "error_of_credentials"]

Operation = Literal["read", "list", "write", "delete"]

_RIGHTS: Final[dict[Operation, str]] = {
    "read": "read it (storage.objects.get",
    "list": "list the bucket (storage.objects.list",
    "write": "write it (storage.objects.create",
    "delete": "delete it (storage.objects.delete",
}
_NAMED: Final[dict[str, Operation]] = {"get": "read", "list": "list", "create": "write", "delete": "delete"}
_RIGHT: Final = re.compile(r"storage\.objects\.(get|list|create|delete)\b")
_BUSY: Final = re.compile(r"rateLimitExceeded|userRateLimitExceeded|quotaExceeded|conflict\b", re.IGNORECASE)
_HELD: Final = re.compile(r"retention policy|retentionPolicyNotMet|\bhold\b|underActiveHold", re.IGNORECASE)
_UNPAID: Final = re.compile(r"billing account|accountDisabled|requester pays|UserProject", re.IGNORECASE)
_KEY: Final = re.compile(r"Cloud KMS|customer.?supplied.?encryption|encrypted with a customer", re.IGNORECASE)
_CLOCK: Final = re.compile(r"\biat\b|reasonable timeframe|token used too early|RequestTimeTooSkewed", re.IGNORECASE)
_MOST_SKEW_S: Final = 300.0
_LOGIN: Final = "gcloud auth application-default login"
_RANGE: Final = re.compile(r"bytes=(\d+)-")


class StrayAnswer(ConnectionError):
    """An answer that GCS did not give. As a failed connection, because the library asks again after one."""


def check_answer(response: Any, *_: object, **__: object) -> None:
    """Refuse what only looks like success: a hook of the session, called with every answer before it is read.

    Raises:
        StrayAnswer: it is not what was asked for.
        StoreError: the object itself is stored compressed.
    """
    try:
        if response.status_code in (200, 206):
            _check_success(response)
        elif response.status_code >= 400:
            response.content  # noqa: B018 - the library leaves it unread after a download, and its connection in use
    except BaseException:
        response.close()
        raise


def _check_success(response: Any) -> None:
    headers, request = response.headers, response.request
    if headers.get("content-type", "").startswith("text/html"):
        raise StrayAnswer("a page of HTML, as proxies and log-in pages send, and nothing of GCS's")
    if "alt=media" not in request.url:
        return
    if headers.get("x-goog-stored-content-encoding", "identity") not in ("", "identity"):
        raise StoreError(
            "the object is stored compressed by whoever put it there, so its bytes are not those of the run",
            found=f"content encoding {headers['x-goog-stored-content-encoding']}",
            hint="Copy it there again as it is, without options such as gcloud's -z or --gzip-local.",
        )
    if headers.get("content-encoding", "identity") not in ("", "identity"):
        raise StrayAnswer(f"bytes that were encoded ({headers['content-encoding']}) between GCS and here")
    wanted = _RANGE.match(request.headers.get("range") or "")
    if wanted is None:
        return
    sent = _RANGE.match((headers.get("content-range") or "").replace(" ", "="))
    first = int(sent[1]) if sent is not None and response.status_code == 206 else 0
    if first != int(wanted[1]):
        raise StrayAnswer(f"bytes from {first} on, where those from {wanted[1]} on were asked for")


def error_of_answer(
    error: Any, operation: Operation, where: str, bucket: str, bucket_exists: Callable[[], bool]
) -> Exception:
    """Return what an answer means.

    Args:
        error: the library's.
        operation: what was asked.
        where: the object, for messages.
        bucket: its bucket.
        bucket_exists: asked when an answer leaves open what is missing.
    """
    said, status = str(error), int(error.code or 0)
    found = brief(error)
    if status == 412:
        if operation == "read":
            return StoreUnavailable("an object was replaced while it was read", file=where, found=found)
        return ObjectExists("object exists", file=where)
    if status == 404:
        return _not_found(said, operation, where, bucket, bucket_exists)
    if status == 416:
        return PastTheEnd()
    if _HELD.search(said):
        return StoreError(
            "the bucket keeps it: a retention policy or a hold",
            file=where,
            found=found,
            hint="It goes when its time is over. For a bucket of runs, leave retention out (docs/stores.md).",
        )
    if _UNPAID.search(said):
        hint = "Look at the billing of the bucket's project; a bucket whose requester pays is not supported."
        return StoreError("GCS refuses, since nobody pays", file=where, found=found, hint=hint)
    if _KEY.search(said):
        hint = "Enable the key in Cloud KMS, and let GCS's service account use it."
        return StoreError("GCS cannot use the key that encrypts the object", file=where, found=found, hint=hint)
    if status == 507:  # of a store that only speaks GCS
        hint = "Free space there, or prune old versions; nothing of this version was published."
        return StoreError("GCS has no room", file=where, found=found, hint=hint)
    if status == 401:
        return _unauthorized(error, operation, where)
    if _BUSY.search(said) or status in (408, 409, 410, 429) or status >= 500:
        return StoreUnavailable("GCS is busy", file=where, found=found)
    if status == 403:
        return StoreError("GCS refuses", file=where, found=found, hint=_right_to(said, operation))
    return StoreError("GCS refuses", file=where, found=found, hint="See docs/stores.md.")


def error_of_credentials(error: Exception, where: str) -> StoreError:
    """Return what it means that credentials cannot be had or renewed.

    Args:
        error: of `google.auth`.
        where: the object, for messages.
    """
    said = brief(error)
    if _CLOCK.search(said):
        return _skewed(where, said)
    if "Anonymous" in said:
        return _anonymous(where, said)
    hint = f"Renew the credentials ({_LOGIN}; or a new key of the service account), and try that."
    return StoreError("the credentials for GCS cannot be renewed", file=where, found=said, hint=hint)


def brief(error: BaseException) -> str:
    """Return the text of an error, on one line and not too long."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."


def _not_found(
    said: str, operation: Operation, where: str, bucket: str, bucket_exists: Callable[[], bool]
) -> Exception:
    if "bucket does not exist" in said or ("No such object" not in said and not bucket_exists()):
        hint = "Make it, or correct sync_dir."
        return StoreError("there is no such bucket", file=where, found=bucket, hint=hint)
    if operation != "write":
        return ObjectNotFound("no such object", file=where)
    return StoreUnavailable(  # an upload's session or part is gone; what it was to make need not be there to be made
        "GCS did not take a write, and says that something is not there",
        file=where,
        found=" ".join(said.split())[:300],
        hint="Try again. If it stays so: are bucket and DELTA_SNAPSHOT_STORE_ENDPOINT_URL right?",
    )


def _unauthorized(error: Any, operation: Operation, where: str) -> StoreError:
    said = brief(error)
    offset = _offset_s(error)
    if _CLOCK.search(said) or abs(offset) > _MOST_SKEW_S:
        return _skewed(where, said, offset)
    if "Anonymous caller" in said:
        return _anonymous(where, said)
    return StoreError(
        "GCS does not accept the credentials: they are expired, revoked, or of something else",
        file=where,
        found=said,
        hint=f"Renew them ({_LOGIN}; or a new key of the service account). {_right_to(said, operation)}",
    )


def _anonymous(where: str, said: str) -> StoreError:
    hint = f"Set them up as for gcloud ({_LOGIN}), and leave DELTA_SNAPSHOT_STORE_ANONYMOUS out."
    return StoreError("GCS refuses who sends no credentials", file=where, found=said, hint=hint)


def _skewed(where: str, said: str, offset: float = 0.0) -> StoreError:
    by = f"this machine is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} the store ({said})"
    return StoreError(
        "the clock of this machine is wrong, so GCS takes no credentials from it",
        file=where,
        found=by if offset else said,
        hint="Set the clock (chrony, ntpd or timedatectl), then try again.",
    )


def _offset_s(error: Any) -> float:
    """Return by how much this clock is ahead of the one that answered; 0 if that did not say what time it is."""
    try:
        return time.time() - parsedate_to_datetime(error.response.headers["date"]).timestamp()
    except (AttributeError, KeyError, TypeError, ValueError):
        return 0.0


def _right_to(said: str, operation: Operation) -> str:
    """Say which right is missing: the one that GCS names, else the one that the request needs."""
    named = _RIGHT.search(said)
    right = _RIGHTS[_NAMED[named[1]] if named else operation]
    return f"These credentials need the right to {right}, docs/stores.md), if they are the ones meant."
