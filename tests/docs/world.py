"""The world that the pages speak of: `/shared/run-1`, `/models/base`, buckets, servers, what the demo left."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest
import torch

from tests.docs.blocks import ENDPOINT, Block
from tests.docs.quick import quick_command
from tests.docs.tiny import batch_of, make_tiny_model, write_tiny_checkpoint
from tests.support.object_stores import ObjectServer, fake_gcs, free_port, ministack
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive import DeltaSync, ServerClient
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store
from vllm_delta_snapshot.upkeep.anchor import write_anchor

VERSIONS = 6
DEMO_BASE = "smollm2-135m-instruct-bf16"
_PATHS = re.compile(r"(?<![\w.:/$}-])/(shared|models|scratch|mnt|nvme)(?=[/\s\"'@]|$)", re.M)
_BUCKET = re.compile(r"\b(s3|gs)://bucket\b")
_SERVER = re.compile(r"http://(localhost|127\.0\.0\.1|node(\d)):8000")
_PORT = re.compile(r"\b947\d\b")


@dataclass
class World:
    """What all pages share: made once, when it is first asked for.

    Args:
        folder: where everything is.
        servers: URLs of vLLM servers that run on the base; empty for pages that need none. Pages that have servers go
            on with one run, as those do; of the others each has its own.
        costly: commands that were run and start an engine of their own, which once is enough for.
    """

    folder: Path
    servers: Sequence[str] = ()
    costly: list[list[str]] = field(default_factory=list)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @cached_property
    def base(self) -> Path:
        """The base checkpoint."""
        return write_tiny_checkpoint(self.folder / "base")

    @cached_property
    def run(self) -> Path:
        """A run with six versions, a reward each, and an anchor of the third."""
        folder = self.folder / "run"
        model = make_tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with DeltaPublisher(model, sync_dir=str(folder), base=self.base, asynchronous=False) as publisher:
            for step in range(1, VERSIONS + 1):
                optimizer.zero_grad()
                model(batch_of(step)).backward()
                optimizer.step()
                publisher.publish(step=step, metrics={"reward": step / 10})
        write_anchor(RunFolder(open_store(str(folder))), Checkpoint(self.base), 3)
        return folder

    @cached_property
    def another_run(self) -> Path:
        """Another run of the same base, with one version."""
        folder = self.folder / "another-run"
        model = make_tiny_model()
        with (
            DeltaPublisher(model, sync_dir=str(folder), base=self.base, asynchronous=False) as publisher,
            torch.no_grad(),
        ):
            for weight in model.parameters():
                weight.neg_()
            publisher.publish()
        return folder

    @cached_property
    def demo(self) -> Path:
        """What `make demo` leaves, of a smaller model."""
        folder = self.folder / "demo_out"
        folder.mkdir()
        (folder / "cache").mkdir()
        (folder / "cache" / DEMO_BASE).symlink_to(self.base)
        shutil.copytree(self.run, folder / "sync")
        materialize(RunFolder(open_store(str(self.run))), Checkpoint(self.base), VERSIONS, folder / "final")
        return folder

    def store(self, scheme: str) -> ObjectServer:
        """The server for ``s3://`` or ``gs://``."""
        return self._s3 if scheme == "s3" else self._gs

    @cached_property
    def _s3(self) -> ObjectServer:
        return self.stack.enter_context(ministack(self.folder / "ministack.log"))

    @cached_property
    def _gs(self) -> ObjectServer:
        return self.stack.enter_context(fake_gcs(self.folder / "gcs.log"))

    @cached_property
    def commands(self) -> Path:
        """A folder with the command, which is forked instead of started: see `quick_command`."""
        return self.stack.enter_context(quick_command(self.folder / "venv", ["vllm"] if self.servers else []))

    def desk(self, page: str) -> Desk:
        """Return a place for the blocks of a page."""
        name = re.sub(r"\W", "-", page)
        root = self.folder / "shared" if self.servers else self.folder / f"root-{name}"
        if not root.exists():
            (root / "shared").mkdir(parents=True)
            (root / "models").mkdir()
            (root / "scratch").mkdir()
            (root / "models" / "base").symlink_to(self.base)
            shutil.copytree(self.run, root / "shared" / "run-1")
            shutil.copytree(self.another_run, root / "shared" / "run-2")
        desk = Desk(self, root, self.folder / f"at-{name}")
        desk.here.mkdir()
        shutil.copytree(self.demo, desk.here / "demo_out", symlinks=True)
        (desk.here / ".venv").symlink_to(self.commands.parent)
        return desk


@dataclass
class Desk:
    """Where the blocks of one page are run.

    Args:
        world: the world.
        root: stands for ``/``.
        here: the current folder.
    """

    world: World
    root: Path
    here: Path
    _buckets: dict[str, str] = field(default_factory=dict)
    _scheme: str = ""

    @property
    def sync_dir(self) -> str:
        """The run's folder."""
        return str(self.root / "shared" / "run-1")

    @property
    def base(self) -> Path:
        """The base checkpoint."""
        return self.root / "models" / "base"

    def server(self, number: int = 1) -> str:
        """Return the URL of a server."""
        return self.world.servers[(number - 1) % len(self.world.servers)]

    def bucket(self, scheme: str) -> str:
        """Return the name of the bucket that stands for ``bucket``: it has the run too."""
        if scheme not in self._buckets:
            server = self.world.store(scheme)
            self._buckets[scheme] = server.make_bucket()
            self._upload(f"{scheme}://{self._buckets[scheme]}/run-1", server.environment)
        return self._buckets[scheme]

    def move_servers(self, scheme: str) -> None:
        """Have the servers follow the run in the bucket instead of the one in the folder."""
        for url in self.world.servers:
            ServerClient(url).init(sync_dir=f"{scheme}://{self.bucket(scheme)}/run-1")

    def bring_back(self, server: str) -> None:
        """Have a server that was moved to the other run follow this one again: the other blocks are about it."""
        run = RunFolder(open_store(self.sync_dir))
        fleet = DeltaSync([server], sync_dir=self.sync_dir, switch_run=True)
        fleet.sync(run.newest(), run_id=run.read_run().run_id).check()

    def _upload(self, uri: str, environment: Mapping[str, str]) -> None:
        with pytest.MonkeyPatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            store = open_store(uri)
            for file in sorted(Path(self.sync_dir).rglob("*")):
                if file.is_file():
                    store.put(str(file.relative_to(self.sync_dir)), [memoryview(file.read_bytes())])

    def translated(self, block: Block) -> str:
        """Return a block's text with what there is here in the place of what it names."""
        text = _PATHS.sub(lambda found: str(self.root / found[1]), block.text)
        if self.world.servers:
            text = _SERVER.sub(lambda found: self.server(int(found[2] or 1)), text)
        if block.needs_bucket:
            text = _BUCKET.sub(lambda found: f"{found[1]}://{self.bucket(found[1])}", text)
            if ENDPOINT in text:
                text = text.replace(ENDPOINT, self.world.store("s3").url)
        return _PORT.sub(lambda _: str(self.port), text)

    def environment(self, block: Block) -> Mapping[str, str]:
        """Return the variables that a block needs to find the store that it names, or that one before has named."""
        if block.needs_bucket:
            self._scheme = next(iter(_BUCKET.findall(block.text)), "s3")
        found = {"DELTA_SNAPSHOT_STAGE_DIR": str(self.world.folder / "stage")}
        return found | (self.world.store(self._scheme).environment if self._scheme else {})

    @cached_property
    def port(self) -> int:
        return free_port()
