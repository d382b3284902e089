# SPDX-License-Identifier: Apache-2.0
"""What S3 says went wrong, in our words: each answer by what its user has to do, never by its status alone.

And what is no answer of S3, though its status says that all is well: a page to log in at, bytes that somebody
compressed on their way. boto3 takes some of that for success, and other pages for a failure of S3's.
"""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import Any, Final

from vllm_delta_snapshot.errors import (
    ExclusiveCreateUnsupported,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)
from vllm_delta_snapshot.store.bucket import PastTheEnd

__all__ = ["CONFLICTS", "NOT_S3", "check_success", "error_of_answer"]

NOT_S3: Final = "what answered is not S3"

CONFLICTS: Final = frozenset({"ConditionalRequestConflict", "OperationAborted"})
"""Another request for the same name was under way: S3 asks to be asked again."""

_MAY_PASS: Final = CONFLICTS | {
    *("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling", "ThrottlingException"),
    "NoSuchUpload",
}
_FULL: Final = frozenset({"XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded", "EntityTooLarge"})
_SKEWED: Final = frozenset({"RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"})
_EXPIRED: Final = frozenset({"ExpiredToken", "TokenRefreshRequired", "InvalidToken"})
_DENIED: Final = frozenset({"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403", "401"})
_RIGHTS: Final = {
    "GetObject": "read it (s3:GetObject",
    "HeadObject": "read it (s3:GetObject",
    "ListObjectsV2": "list the bucket (s3:ListBucket",
    "ListMultipartUploads": "list uploads (s3:ListBucketMultipartUploads",
    "DeleteObject": "delete it (s3:DeleteObject",
    "AbortMultipartUpload": "abort uploads (s3:AbortMultipartUpload",
}
_TAGGED: Final = frozenset({"PutObject", "UploadPart", "GetObject", "HeadObject"})
_LISTED: Final = frozenset({"Name", "Prefix", "KeyCount", "IsTruncated"})
_PAGE: Final = "a page of HTML, as proxies and log-in pages send"
_PLAIN: Final = ("", "identity", "aws-chunked")
"""Encodings that leave bytes as they are; some stores keep that in which boto3 sent them."""
_READS: Final = frozenset({"GetObject", "HeadObject", "ListObjectsV2"})
_HIDDEN: Final = " Without s3:ListBucket, S3 answers so for what does not exist, too."


def check_success(http_response: Any, parsed: dict[str, Any], model: Any, **_: Any) -> None:
    """Refuse what only looks like success: called with every answer, before it is believed.

    Raises:
        StoreUnavailable: it is not what was asked for. Names no object.
    """
    if http_response.status_code not in (200, 206):
        return
    found = _not_from_s3(http_response.headers, parsed, str(model.name))
    if found is None:
        return
    if model.name == "GetObject":
        parsed["Body"].close()
    raise _stray(found)


def _stray(found: str, where: str | None = None) -> StoreUnavailable:
    hint = "Look at proxies (HTTPS_PROXY) and the endpoint: does curl get the same?"
    return StoreUnavailable(NOT_S3, file=where, found=found, hint=hint)


def _not_from_s3(headers: Any, parsed: dict[str, Any], operation: str) -> str | None:
    """Return why an answer cannot be S3's."""
    is_signed = any(name.lower().startswith("x-amz") for name in headers)  # some stores call every answer HTML
    if not is_signed and str(headers.get("content-type", "")).startswith("text/html"):
        return _PAGE
    if operation in _TAGGED and not parsed.get("ETag"):
        return f"an answer to {operation} without an ETag"
    if operation == "ListObjectsV2" and not _LISTED & parsed.keys():
        return "an answer that is no listing"
    encoding = str(parsed.get("ContentEncoding", ""))
    if operation in _READS and encoding not in _PLAIN:
        return f"bytes that are encoded ({encoding}), on their way or by whoever put them there"
    return None


def error_of_answer(error: Any, where: str, bucket: str) -> Exception:
    """Return what an answer means.

    Args:
        error: botocore's `ClientError`.
        where: the object, for messages.
        bucket: its bucket.
    """
    answer, operation = error.response, str(error.operation_name)
    code = str(answer.get("Error", {}).get("Code", ""))
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"{code}: {answer.get('Error', {}).get('Message', '')}".strip(": ") or f"status {status}"
    if code == "NoSuchBucket":
        hint = "Make it, or correct sync_dir, region or DELTA_SNAPSHOT_STORE_ENDPOINT_URL."
        return StoreError("there is no such bucket", file=where, found=bucket, hint=hint)
    if code == "InvalidRange" or status == 416:
        return PastTheEnd()
    if code in ("PreconditionFailed", "412") or status == 412:
        return ObjectExists("object exists", file=where)
    if code in _FULL or status == 507:
        hint = "Free space there, or prune old versions; nothing of this version was published."
        return StoreError("S3 has no room", file=where, found=said, hint=hint)
    if code == "InvalidObjectState":
        return _archived(answer, where, said)
    if code in _SKEWED:
        return _skewed(answer, where, said)
    if code in _EXPIRED:
        hint = "Renew the credentials (for single sign-on: aws sso login); they are read anew at the next start."
        return StoreError("the credentials for S3 have expired", file=where, found=said, hint=hint)
    if code in _DENIED or status in (401, 403):
        return StoreError("S3 refuses", file=where, found=said, hint=_right_to(operation))
    if code == "NotImplemented" or status == 501:
        hint = "Use another store, or pass single_writer=True if only one trainer will ever write here."
        return ExclusiveCreateUnsupported("this store knows no conditional create", file=where, found=said, hint=hint)
    kind = str(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("content-type", ""))
    if status == 500 and kind.startswith("text/html"):  # botocore makes a 500 of a 200 with such a page
        return _stray(_PAGE, where)
    if code in _MAY_PASS or status >= 500 or status in (409, 429):
        return StoreUnavailable("S3 is busy", file=where, found=said)
    if code in ("NoSuchKey", "NotFound", "404") or status == 404:
        return _not_found(operation, where, said)
    return StoreError("S3 refuses", file=where, found=said)


def _not_found(operation: str, where: str, said: str) -> Exception:
    if operation in _READS or operation.startswith(("Delete", "Abort")):
        return ObjectNotFound("no such object", file=where)
    # S3 answers a conditional write so where a deletion of the name is under way; a proxy, where it knows no bucket.
    return StoreUnavailable(
        "S3 did not take a write, and says that something is not there",
        file=where,
        found=said,
        hint="Try again. If it stays so: are bucket, region and DELTA_SNAPSHOT_STORE_ENDPOINT_URL right?",
    )


def _archived(answer: Any, where: str, said: str) -> StoreError:
    storage = answer.get("Error", {}).get("StorageClass")
    bucket, _, key = where.removeprefix("s3://").partition("/")
    return StoreError(
        "the object is archived and cannot be read before it is restored",
        file=where,
        found=f"storage class {storage}" if storage else said,
        hint=f"aws s3api restore-object --bucket {bucket} --key {key} --restore-request Days=7; and take this prefix "
        "out of the bucket's lifecycle rule.",
    )


def _skewed(answer: Any, where: str, said: str) -> StoreError:
    """Return that this machine's clock is wrong, and by how much, if the store says what time it is."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    found = said
    try:
        offset = time.time() - parsedate_to_datetime(date or "").timestamp()
        found = f"this machine is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} the store ({said})"
    except (TypeError, ValueError):
        pass  # it does not say
    return StoreError(
        "the clock of this machine is wrong, so S3 takes no signature of it",
        file=where,
        found=found,
        hint="Set the clock (chrony, ntpd or timedatectl), then try again.",
    )


def _right_to(operation: str) -> str:
    right = _RIGHTS.get(operation, "write it (s3:PutObject")
    hidden = _HIDDEN if operation in ("GetObject", "HeadObject") else ""
    return f"These credentials need the right to {right}, docs/stores.md), if they are the ones meant.{hidden}"
