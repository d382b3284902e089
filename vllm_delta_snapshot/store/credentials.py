# SPDX-License-Identifier: Apache-2.0
"""Which credentials the vendors' libraries find here. Says where they come from; shows nothing of them."""

from __future__ import annotations

from vllm_delta_snapshot.errors import CompatibilityError, StoreError
from vllm_delta_snapshot.store.config import StoreConfig

__all__ = ["credentials_of"]


def credentials_of(uri: str, config: StoreConfig) -> str:
    """Return where the credentials for a bucket come from, in words. May ask the machine's metadata service.

    Args:
        uri: ``s3://...`` or ``gs://...``.
        config: how the store is reached.

    Raises:
        StoreError: there are none, or they cannot be read.
        CompatibilityError: the library is not installed.
    """
    if config.anonymous:
        return "none, by DELTA_SNAPSHOT_STORE_ANONYMOUS or the like"
    return _of_s3() if uri.startswith("s3://") else _of_gcs()


def _of_s3() -> str:
    try:
        import boto3
        import botocore.exceptions
    except ImportError as error:
        raise CompatibilityError("s3:// needs boto3", hint="pip install 'vllm-delta-snapshot[s3]'") from error
    hint = "Set them up as for the aws command, and try that."
    try:
        session = boto3.session.Session()
        found = session.get_credentials()
    except botocore.exceptions.BotoCoreError as error:
        raise StoreError("the credentials for S3 cannot be read", found=error, hint=hint) from error
    if found is None:
        raise StoreError("no credentials for S3", hint=hint)
    return f"boto3 finds them by {found.method!r}, profile {session.profile_name!r}"


def _of_gcs() -> str:
    try:
        import google.auth
        import google.auth.exceptions
    except ImportError as error:
        raise CompatibilityError(
            "gs:// needs google-cloud-storage", hint="pip install 'vllm-delta-snapshot[gcs]'"
        ) from error
    try:
        found, project = google.auth.default()
    except (google.auth.exceptions.GoogleAuthError, OSError, ValueError) as error:
        hint = "Set them up as for gcloud (gcloud auth application-default login), and try that."
        raise StoreError("no credentials for GCS", hint=hint) from error  # its text may quote the file
    return f"google.auth finds {type(found).__module__}.{type(found).__name__}, project {project!r}"
