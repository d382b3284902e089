"""Runs ``delta-snapshot`` in processes that are forked from one that has imported it, as most of its time is imports.

A call gets its own arguments, folder, environment, input and output, and its exit status is passed on. Started as a
program this is the process that is forked; `CALLER` is what lies on the PATH in the place of the command.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.docs.blocks import ROOT

CALLER = """#!{python} -SEs
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"."], [0, 1, 2])
server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
server.shutdown(socket.SHUT_WR)
sys.exit(int(server.recv(4) or 70))
"""


@contextlib.contextmanager
def quick_command(folder: Path, modules: Sequence[str] = ()) -> Iterator[Path]:
    """Start the process, which imports further modules besides; yield a folder with the command, for the PATH."""
    address = folder / "socket"
    command = folder / "bin" / "delta-snapshot"
    command.parent.mkdir(parents=True)
    command.write_text(CALLER.format(python=sys.executable, address=str(address)))
    command.chmod(0o755)
    argv = [sys.executable, "-m", "tests.docs.quick", str(address), *modules]
    process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listening\n"
        yield command.parent
    finally:
        process.terminate()
        process.communicate()


def serve(address: str, modules: Sequence[str]) -> None:
    """Listen at once, import, and fork for every call, until SIGTERM."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(16)
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        import matplotlib.figure  # noqa: F401

        from vllm_delta_snapshot.cli import app  # noqa: F401

        for module in modules:
            importlib.import_module(module)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> None:
    from vllm_delta_snapshot.cli import main

    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    request: list[Any] = json.loads(b"".join(iter(lambda: connection.recv(1 << 16), b"")))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    arguments, folder, environment = request
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["delta-snapshot", *arguments]
    status: object = 70
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except Exception:  # noqa: BLE001 - what the interpreter would do
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(str(status).encode())
        os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
