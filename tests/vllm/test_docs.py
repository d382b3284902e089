"""The blocks of the pages that speak to vLLM servers are run against a real one. The other pages: tests/docs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.docs.blocks import Block, blocks_of, pages, parameters
from tests.docs.commands import arguments_of_server, check_server
from tests.docs.reading import Library
from tests.docs.shell import statements
from tests.docs.world import World
from tests.support.compilers import CAN_COMPILE
from tests.support.server import ServerProcess
from tests.support.stub_server import EngineStub, answering
from tests.support.tiny_tokenizer import save_tokenizer

HEAVY = ("vllm.entrypoints.launchers.cli_args", "trl.trainer.grpo_trainer")


def server_commands() -> list[tuple[Block, list[str]]]:
    """Return the arguments of every server that a page starts, run or not."""
    shown = [block for page in pages() for block in blocks_of(page) if block.language == "bash"]
    found = [(block, arguments_of_server(part.words())) for block in shown for part in statements(block.text)]
    return [(block, arguments) for block, arguments in found if arguments is not None]


def options_of_readme() -> list[str]:
    """Return what README.md starts a server with, but for the model."""
    [arguments] = [arguments for block, arguments in server_commands() if block.page == "README.md"]
    return arguments[1:]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """Start the server that is node 1. Node 2 of a fleet only answers as one: tests/vllm/test_fleet.py has two."""
    folder = tmp_path_factory.mktemp("docs")
    world = World(folder)
    save_tokenizer(world.base)
    options = ("--no-skip-tokenizer-init", "--logprobs-mode", "processed_logprobs", *options_of_readme())
    environment = {"DELTA_SNAPSHOT_STAGE_DIR": str(folder / "stage")} | world.store("s3").environment
    environment |= {"VLLM_CACHE_ROOT": str(folder / "cache")}
    log = folder / "node1.log"
    server = ServerProcess(world.base, log, *options, is_compiled=CAN_COMPILE, **environment)  # as the pages start one
    server.start()
    try:
        with answering(EngineStub()) as stub, Library(world) as found:
            world.servers = [server.client.url, stub.url]
            assert world.commands.is_dir()  # it begins to import, as this process does, while the server starts
            for module in HEAVY:
                if find_spec(module.partition(".")[0]):
                    importlib.import_module(module)
            server.wait_ready()
            yield found
    finally:
        server.stop()


@pytest.mark.parametrize("block", parameters(needs_engine=True))
def test_block(block: Block, library: Library) -> None:
    library.read(block)


def test_vllm_takes_every_server_command() -> None:
    for block, arguments in server_commands():
        check_server(arguments)
        assert "VLLM_SERVER_DEV_MODE=1" in block.text, f"{block}: there would be no routes for updates"
    with pytest.raises(AssertionError):
        check_server(["/models/base", "--weight-transfer-configs", "{}"])
