# SPDX-License-Identifier: Apache-2.0
"""boto3's client, set up for large objects and for stores that only speak S3; and its errors in our words."""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

from vllm_delta_snapshot.errors import CompatibilityError, StoreError, StoreUnavailable
from vllm_delta_snapshot.store.config import StoreConfig
from vllm_delta_snapshot.store.s3_answers import CONFLICTS, check_success, error_of_answer
from vllm_delta_snapshot.util.traffic import count_retry

__all__ = ["make_client", "reported"]

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_CHANCE: Final = random.SystemRandom()  # of its own: a trainer's seeds must not be used up here
_AWS: Final = {
    "retries": ("AWS_RETRY_MODE", "retry_mode", "AWS_MAX_ATTEMPTS", "max_attempts"),
    "request_checksum_calculation": ("AWS_REQUEST_CHECKSUM_CALCULATION", "request_checksum_calculation"),
    "response_checksum_validation": ("AWS_RESPONSE_CHECKSUM_VALIDATION", "response_checksum_validation"),
}
"""By option of ours: where a user sets it for every tool of AWS."""


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
    try:
        session = boto3.session.Session(region_name=config.region)
        options = _options(config, session._session.get_scoped_config())
        if config.anonymous:
            options["signature_version"] = UNSIGNED
        region = session.region_name or ("us-east-1" if _is_other(config, session) else None)
        client = session.client("s3", endpoint_url=config.endpoint_url, region_name=region, config=Config(**options))
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise StoreError("S3 cannot be set up", file=config.endpoint_url, found=error) from error
    client.meta.events.register("needs-retry.s3", functools.partial(_pause_after_conflict, config.attempts))
    client.meta.events.register("after-call.s3", _count_retries)
    client.meta.events.register("after-call.s3", check_success)
    return client


def _options(config: StoreConfig, scoped: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a client: what was set for us, and else nothing that was set for all of AWS's tools.

    Args:
        config: ours.
        scoped: the profile in AWS's own configuration file.
    """
    given, is_ours = config.model_fields_set, config.endpoint_url is not None
    # Stores that are not Amazon's answer ranged requests with checksums of the whole object, or refuse them.
    checksums = ("when_required" if is_ours else None) if config.checksums == "auto" else config.checksums
    options: dict[str, Any] = {
        "connect_timeout": config.connect_timeout_s,
        "read_timeout": config.read_timeout_s,
        "max_pool_connections": config.concurrency + 2,
    }
    wanted: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": config.attempts},
        "request_checksum_calculation": checksums,
        "response_checksum_validation": checksums,
    }
    for name, value in wanted.items():
        is_explicit = "attempts" in given if name == "retries" else config.checksums != "auto"
        is_set_for_all = any(place in os.environ or place in scoped for place in _AWS[name])
        if value is not None and (is_explicit or not is_set_for_all):
            options[name] = value
    style = {None: "path" if is_ours else None, True: "path", False: "virtual"}[config.path_style]
    is_style_set = isinstance(scoped.get("s3"), Mapping) and "addressing_style" in scoped["s3"]
    if style is not None and (config.path_style is not None or not is_style_set):
        options["s3"] = {"addressing_style": style}
    return options


def _is_other(config: StoreConfig, session: Any) -> bool:
    """Say whether some endpoint is set: a store that is not Amazon's needs no region, and boto3 asks for one."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    scoped = session._session.get_scoped_config()
    return bool(config.endpoint_url or any(map(os.environ.get, names)) or {"endpoint_url", "services"} & scoped.keys())


def _pause_after_conflict(most: int, response: Any, attempts: int, **_: Any) -> float | None:
    """Have botocore, whose own rules do not know them, make a request again that met another one for the same name."""
    code = "" if response is None else str(response[1].get("Error", {}).get("Code", ""))
    if code not in CONFLICTS or attempts >= most:
        return None
    return _CHANCE.uniform(0.0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempts))


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
    except StoreError as error:
        raise error if error.file else error.placed(file=where, hint="") from error
    except botocore.exceptions.ClientError as error:
        raise error_of_answer(error, where, bucket) from error
    except (botocore.exceptions.NoCredentialsError, botocore.exceptions.PartialCredentialsError) as error:
        raise StoreError(
            "no credentials for S3", file=where, found=error, hint="Set them up as for the aws command, and try that."
        ) from error
    except (botocore.exceptions.BotoCoreError, urllib3.exceptions.HTTPError, OSError) as error:
        raise StoreUnavailable("S3 does not answer", file=where, found=_brief(error)) from error


def _brief(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= 300 else f"{text[:300]}..."
