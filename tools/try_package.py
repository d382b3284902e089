"""Try the wheel as somebody who has nothing else: ``python -m tools.try_package VENV DIST``, for `make package`.

VENV is an environment that holds torch at most. Installs the wheel there, without extras, and checks what is said where
an extra is missing; then extra by extra until nothing is missing. Needs nothing but Python; stops at the first mistake.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["main"]

_BARE: Final = """
import sys, trainer_hooks, vllm_delta_snapshot
assert "site-packages" in trainer_hooks.__file__, trainer_hooks.__file__
from importlib.metadata import entry_points
(plugin,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "delta_snapshot"]
plugin.load()
assert not {"vllm", "numba", "typer", "boto3", "matplotlib"} & set(sys.modules)
"""
_PUBLISH: Final = """
import json, sys, pathlib, torch
from trainer_hooks import DeltaPublisher
folder = pathlib.Path(sys.argv[1])
base = folder / "base"
base.mkdir()
header = json.dumps({"w": {"dtype": "BF16", "shape": [64], "data_offsets": [0, 128]}}).encode()
(base / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(128))
weights = {"w": torch.zeros(64)}
publisher = DeltaPublisher(weights, sync_dir=str(folder / "run"), base=base)
weights["w"][::8] = 1.5
assert publisher.publish(step=1).wait().changed_elements == 8
publisher.close()
"""
_METRICS: Final = "from trainer_hooks import PublishMetrics; PublishMetrics()"


@dataclass(frozen=True, slots=True)
class Need:
    """What needs an extra.

    Attributes:
        extra: its name.
        command: of a tool, or ``-c`` and Python.
        code: how it ends where the extra is missing.
        missing: what is said then; followed by how to install it.
        with_cli: whether it is the command line's, and so needs [cli] too.
    """

    extra: str
    command: tuple[str, ...]
    code: int
    missing: str
    with_cli: bool = True


class Environment:
    """A virtual environment.

    Args:
        folder: where it lies.
    """

    def __init__(self, folder: Path) -> None:
        self._bin = folder.resolve() / "bin"
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "VLLM_PLUGINS")
        self._variables = {name: value for name, value in os.environ.items() if name not in hidden}

    def install(self, what: str) -> None:
        """Install with pip."""
        self.run(0, "python", "-m", "pip", "--disable-pip-version-check", "install", "-q", what)

    def run(self, code: int | tuple[int, ...], tool: str, *arguments: str) -> str:
        """Run one of its tools, away from this folder, and return what it said.

        Raises:
            SystemExit: it ended with another code than `code`, or with a traceback.
        """
        with tempfile.TemporaryDirectory() as elsewhere:
            ended = subprocess.run(
                [str(self._bin / tool), *arguments],
                env=self._variables, cwd=elsewhere, capture_output=True, text=True, check=False, timeout=1200,
            )  # fmt: skip
        said = ended.stdout + ended.stderr
        expected = (code,) if isinstance(code, int) else code
        is_python = tool == "python"  # which ends an error with a traceback
        if ended.returncode not in expected or ("Traceback" in said and not is_python):
            sys.exit(f"{tool} {' '.join(arguments)}\nended with {ended.returncode}, expected {code}:\n{said}")
        return said


def main(venv: Path, dist: Path) -> None:
    """Try it."""
    (wheel,) = dist.resolve().glob("*.whl")
    environment = Environment(venv)
    environment.install(str(wheel))
    environment.run(0, "python", "-c", _BARE)
    with tempfile.TemporaryDirectory() as folder:
        environment.run(0, "python", "-c", _PUBLISH, folder)  # without numba (extra [fast]): slower, the same result
        _say("imports, registers its plugin and publishes without any extra")
        run = str(Path(folder) / "run")
        needs = (
            Need("cli", ("delta-snapshot", "doctor"), 2, "needs typer"),
            Need("plot", ("delta-snapshot", "plot", run, "-o", f"{folder}/plots"), 2, "pictures need matplotlib"),
            Need("s3", ("python", "-c", _opens("s3")), 1, "s3:// needs boto3", with_cli=False),
            Need("gcs", ("python", "-c", _opens("gs")), 1, "gs:// needs google-cloud-storage", with_cli=False),
            Need("metrics", ("python", "-c", _METRICS), 1, "metrics need prometheus-client", with_cli=False),
        )
        for need in needs:
            if need.extra == "cli" or not need.with_cli:
                _check_missing(environment, need)
        environment.install(f"{wheel}[cli]")
        for need in needs:
            if need.extra != "cli" and need.with_cli:
                _check_missing(environment, need)
        _check_command_line(environment, run)
        for need in needs:
            environment.install(f"{wheel}[{need.extra}]")
            environment.run((0, 1) if "doctor" in need.command else 0, *need.command)
            _say(f"[{need.extra}] brings what it says")
        environment.install(f"{wheel}[fast]")
        environment.run(
            0, "python", "-c", "from trainer_hooks.compare.kernel import load_kernel as f; assert f() is not None"
        )
        _say("[fast] brings what it says")


def _opens(scheme: str) -> str:
    return (
        "from vllm_delta_snapshot.store import StoreConfig, open_store; "
        f"open_store('{scheme}://bucket/run', config=StoreConfig(anonymous=True, region='us-east-1'))"
    )


def _check_missing(environment: Environment, need: Need) -> None:
    said = environment.run(need.code, *need.command)
    hint = f"pip install 'vllm-delta-snapshot[{need.extra}]'"
    if need.missing not in said or hint not in said:
        sys.exit(f"without [{need.extra}]: expected {need.missing!r} and {hint!r}, found:\n{said}")
    _say(f"says that [{need.extra}] is missing")


def _check_command_line(environment: Environment, run: str) -> None:
    if "verify" not in environment.run(0, "delta-snapshot", "--help"):
        sys.exit("delta-snapshot --help does not name its verbs")
    if "vllm: not installed here" not in environment.run(1, "delta-snapshot", "doctor"):
        sys.exit("delta-snapshot doctor does not say that vLLM is missing")
    for verb in ("log", "verify", "inspect"):
        environment.run(0, "delta-snapshot", verb, run)
    _say("[cli]: --help, doctor, log, verify and inspect work; doctor says that vLLM is missing")


def _say(text: str) -> None:
    print(f"ok  {text}", flush=True)  # noqa: T201 - it is a command


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
