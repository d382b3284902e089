# SPDX-License-Identifier: Apache-2.0
"""Network namespaces need rights over a network: root's, or those that a user namespace of one's own gives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Final

_AS_ROOT_INSIDE: Final = (
    *("unshare", "--user", "--map-root-user", "--mount", "--net"),
    *("sh", "-c", 'mount -t tmpfs none /run && exec "$@"', "sh"),
)
"""`ip netns` keeps its names under /run, which a user may write in a mount namespace of its own only."""

WHAT_TO_DO: Final = (
    "It needs Linux, iproute2 (apt install iproute2), and one of: root; a container with NET_ADMIN and "
    "SYS_ADMIN; a kernel that permits user namespaces to everybody (sysctl user.max_user_namespaces above 0, and "
    "kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu)."
)


def take_rights(module: str, arguments: list[str]) -> None:
    """Start this program again inside a user namespace, if that is needed and permitted; else return.

    Args:
        module: the program.
        arguments: its arguments.
    """
    if not hasattr(os, "geteuid") or os.geteuid() == 0 or shutil.which("unshare") is None:
        return
    if subprocess.run([*_AS_ROOT_INSIDE, "true"], capture_output=True, check=False).returncode == 0:
        os.execvp(_AS_ROOT_INSIDE[0], [*_AS_ROOT_INSIDE, sys.executable, "-m", module, *arguments])
