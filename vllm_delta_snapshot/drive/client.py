# SPDX-License-Identifier: Apache-2.0
"""One vLLM server over its stock RL routes. One method a route; no policy, no retries (see `drive.sync`).

The server must run with ``VLLM_SERVER_DEV_MODE=1``, which is what makes vLLM serve these routes.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from vllm_delta_snapshot.errors import CompatibilityError, DeltaSnapshotError, Recovery, error_kind
from vllm_delta_snapshot.store.secrets import has_credentials, presentable

__all__ = ["PauseMode", "ServerClient", "ServerError"]

PauseMode = Literal["keep", "wait", "abort"]
"""What a pause does with running requests: freeze them, let them end, or end them."""


class ServerError(DeltaSnapshotError):
    """A server did not do what it was asked to.

    Attributes:
        status: the HTTP status; ``None`` if there was no answer.
        kind: the class of the error that the engine reported, if it was one of ours.
    """

    recovery: ClassVar[Recovery] = Recovery.RETRY
    status: int | None = None
    kind: type[DeltaSnapshotError] | None = None


class ServerClient:
    """See the module. Every method blocks.

    Args:
        url: such as ``http://127.0.0.1:8000``.
        api_key: sent as a bearer token; appears in no message.
        headers: sent with every request.
        timeout_s: for one request.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ServerError("not a server's URL", expected="http://host:port", found=presentable(url))
        if has_credentials(url):
            raise ServerError(
                "a server's URL holds credentials",
                expected="http://host:port",
                hint="Give the server's key by VLLM_API_KEY or api_key, other headers by `headers`.",
            )
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def wait_ready(self, *, timeout_s: float, is_alive: Callable[[], bool] = lambda: True) -> None:
        """Wait until the server answers ``/health``.

        Args:
            timeout_s: how long.
            is_alive: asked between tries; ``False`` ends the waiting.

        Raises:
            ServerError: it did not answer in time, or is not alive.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.request("GET", "/health", timeout_s=5.0)
                return
            except ServerError as error:
                if not is_alive():
                    raise ServerError("the server has ended", file=self.url, hint="Look at its log.") from error
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.2)

    def init(self, **init_info: object) -> None:
        """Initialize the backend: ``sync_dir`` and the other fields of `init_info`.

        Raises:
            ServerError: it refused; the message has its reason.
        """
        self.request("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    def start_update(self) -> None:
        """Begin an update. Raises: ServerError."""
        self.request("POST", "/start_weight_update")

    def update(self, **update_info: object) -> None:
        """Send an `update_info`. Raises: ServerError."""
        self.request("POST", "/update_weights", {"update_info": update_info})

    def finish_update(self, label: str | None = None) -> None:
        """End an update, and set the server's version label. Raises: ServerError."""
        self.request("POST", "/finish_weight_update", None if label is None else {"weight_version": label})

    def pause(self, mode: PauseMode) -> None:
        """Pause generation. Raises: ServerError."""
        self.request("POST", f"/pause?mode={mode}")

    def resume(self) -> None:
        """Resume generation. Raises: ServerError."""
        self.request("POST", "/resume")

    def is_paused(self) -> bool:
        """Return whether generation is paused. Raises: ServerError."""
        return bool(self.request("GET", "/is_paused").get("is_paused"))

    def reset_caches(self, *, running_requests: bool) -> bool:
        """Reset the prefix, multi-modal and encoder caches.

        Args:
            running_requests: also drop what running requests have computed; they compute it again.

        Returns:
            Whether the prefix cache could be reset; running requests hold it otherwise.

        Raises:
            ServerError: no answer, or an unexpected one.
        """
        flag = "true" if running_requests else "false"
        answer = self.request("POST", f"/reset_prefix_cache?reset_running_requests={flag}")
        self.request("POST", "/reset_mm_cache")
        self.request("POST", "/reset_encoder_cache")
        return bool(answer.get("success"))

    def set_weight_version(self, label: str) -> None:
        """Set the version label without an update. Raises: ServerError."""
        self.request("POST", "/update_weight_version", {"new_version": label})

    def weight_version(self) -> str:
        """Return the version label. Raises: ServerError."""
        return str(self.request("GET", "/weight_info").get("weight_version"))

    def checksums(self) -> dict[str, str]:
        """Return vLLM's own digest of every live parameter. Raises: ServerError."""
        return dict(self.request("POST", "/weight_checker", {"action": "checksum"})["checksums"])

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Make one request and return its JSON object (empty if there is none).

        Raises:
            ServerError: no answer, an error status, or an answer that is no JSON object.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers, method=method)  # noqa: S310
        where = f"{method} {self.url}{path}"
        try:
            with urllib.request.urlopen(request, timeout=timeout_s or self.timeout_s) as response:  # noqa: S310
                content = response.read()
        except urllib.error.HTTPError as error:
            raise _refusal(where, error) from error
        except (OSError, http.client.HTTPException) as error:
            hint = "Is it running, and is that its URL?"
            raise ServerError("the server does not answer", file=where, found=error, hint=hint) from error
        if not content.strip():
            return {}
        try:
            answer = json.loads(content)
        except ValueError as error:
            raise ServerError("the answer is not JSON", file=where, found=repr(content[:80])) from error
        return answer if isinstance(answer, dict) else {"answer": answer}


def _refusal(where: str, error: urllib.error.HTTPError) -> ServerError:
    text = error.read().decode(errors="replace")
    try:
        content = json.loads(text)
        inner = content.get("error", content)
        message = inner.get("message", inner) if isinstance(inner, dict) else inner
    except (ValueError, AttributeError):
        message = text
    hint = None
    if error.code == 404 and not error.url.endswith("/weight_checker"):
        hint = "Start the server with VLLM_SERVER_DEV_MODE=1, which enables vLLM's weight update routes."
    is_older = "unexpected keyword argument 'run'" in str(message)
    if is_older:
        hint = "The server has an older vllm-delta-snapshot than this driver: upgrade it there, and restart the server."
    refusal = ServerError(f"the server answered {error.code}", file=where, found=str(message)[:2000], hint=hint)
    refusal.status = error.code
    refusal.kind = CompatibilityError if is_older else error_kind(str(message))
    return refusal
