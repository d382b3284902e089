# SPDX-License-Identifier: Apache-2.0
"""boto3's client, set up for large objects and for stores that only speak S3; and its errors in our words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from vllm_delta_snapshot.errors import (
    CompatibilityError,
    ExclusiveCreateUnsupported,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)
from vllm_delta_snapshot.store.bucket import PastTheEnd
from vllm_delta_snapshot.store.config import StoreConfig
from vllm_delta_snapshot.traffic import count_retry

__all__ = ["make_client", "reported"]

_MAY_PASS: Final = frozenset(
    {"SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "InternalError", "ServiceUnavailable", "Throttling"}
    | {"ThrottlingException", "ConditionalRequestConflict", "OperationAborted", "NoSuchUpload"}
)
_FULL: Final = frozenset({"XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded", "EntityTooLarge"})
_DENIED: Final = frozenset(
    {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "403", "401"}
)


def make_client(config: StoreConfig) -> Any:
    """Return a client of S3. Makes no request. It may be used from several threads.

    Raises:
        CompatibilityError: boto3 is not installed.
        StoreError: boto3's own configuration is wrong.
    """
    try:
        import boto3
        import botocore.exceptions
        from botocore import UNSIGNED
        from botocore.config import Config
    except ImportError as error:
        raise CompatibilityError(
            "s3:// needs boto3", found=error, hint="pip install 'vllm-delta-snapshot[s3]'"
        ) from error
    is_other = config.endpoint_url is not None
    checksums = config.checksums
    if checksums == "auto":
        # Stores that are not Amazon's answer ranged requests with checksums of the whole object, or refuse them.
        checksums = "when_required" if is_other else "when_supported"
    style = {None: "path" if is_other else "auto", True: "path", False: "virtual"}[config.path_style]
    options: dict[str, Any] = {
        "connect_timeout": config.connect_timeout_s,
        "read_timeout": config.read_timeout_s,
        "retries": {"mode": "standard", "total_max_attempts": config.attempts},
        "max_pool_connections": config.concurrency + 2,
        "request_checksum_calculation": checksums,
        "response_checksum_validation": checksums,
        "s3": {"addressing_style": style},
    }
    if config.anonymous:
        options["signature_version"] = UNSIGNED
    try:
        session = boto3.session.Session(region_name=config.region)
        region = session.region_name or ("us-east-1" if is_other else None)
        client = session.client("s3", endpoint_url=config.endpoint_url, region_name=region, config=Config(**options))
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise StoreError("S3 cannot be set up", file=config.endpoint_url, found=error) from error
    client.meta.events.register("after-call.s3", _count_retries)
    return client


def _count_retries(parsed: dict[str, Any], model: Any, **_: Any) -> None:
    operation = {"G": "read", "H": "read", "L": "list", "D": "delete"}.get(model.name[0], "write")
    for _attempt in range(int(parsed.get("ResponseMetadata", {}).get("RetryAttempts", 0))):
        count_retry(operation)


@contextlib.contextmanager
def reported(where: str, bucket: str) -> Iterator[None]:
    """Turn boto3's errors into ours.

    Args:
        where: the object, for messages.
        bucket: its bucket.

    Raises:
        PastTheEnd: a range begins after the end of an object.
    """
    import botocore.exceptions
    import urllib3.exceptions

    try:
        yield
    except botocore.exceptions.ClientError as error:
        raise _of_answer(error, where, bucket) from error
    except (botocore.exceptions.NoCredentialsError, botocore.exceptions.PartialCredentialsError) as error:
        raise StoreError(
            "no credentials for S3", file=where, found=error, hint="Set them up as for the aws command, and try that."
        ) from error
    except (botocore.exceptions.BotoCoreError, urllib3.exceptions.HTTPError, OSError) as error:
        raise StoreUnavailable("S3 does not answer", file=where, found=_brief(error)) from error


def _of_answer(error: Any, where: str, bucket: str) -> Exception:
    answer = error.response
    code = str(answer.get("Error", {}).get("Code", ""))
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"{code}: {answer.get('Error', {}).get('Message', '')}".strip(": ")
    if code == "NoSuchBucket":
        hint = "Make it, or correct sync_dir, region or DELTA_SNAPSHOT_STORE_ENDPOINT_URL."
        return StoreError("there is no such bucket", file=where, found=bucket, hint=hint)
    if code == "InvalidRange" or status == 416:
        return PastTheEnd()
    if code in ("PreconditionFailed", "412") or status == 412:
        return ObjectExists("object exists", file=where)
    if code in _FULL or status == 507:
        hint = "Free space there, or prune old versions; nothing of this version was published."
        return StoreError("S3 has no room", file=where, found=said or f"status {status}", hint=hint)
    if code in _DENIED or status in (401, 403):
        hint = "Look at the credentials and the bucket's policy: see docs/stores.md."
        return StoreError("S3 refuses", file=where, found=said, hint=hint)
    if code == "NotImplemented" or status == 501:
        hint = "Use another store, or pass single_writer=True if only one trainer will ever write here."
        return ExclusiveCreateUnsupported("this store knows no conditional create", file=where, found=said, hint=hint)
    if code in _MAY_PASS or status >= 500 or status in (409, 429):
        return StoreUnavailable("S3 is busy", file=where, found=said)
    if code in ("NoSuchKey", "NotFound", "404") or status == 404:
        return ObjectNotFound("no such object", file=where)
    return StoreError("S3 refuses", file=where, found=said or f"status {status}")


def _brief(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= 300 else f"{text[:300]}..."
