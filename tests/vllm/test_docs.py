"""The blocks of the pages that speak to vLLM servers are run against two real ones. The other pages: tests/docs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docs.blocks import Block, blocks_of, parameters
from tests.docs.reading import Library
from tests.docs.shell import statements
from tests.docs.world import World
from tests.support.engines import engine  # sets up vLLM in this process  # noqa: F401
from tests.support.server import ServerProcess, servers
from tests.support.tiny_tokenizer import save_tokenizer


def options_of_readme() -> list[str]:
    """Return what README.md starts a server with, but for the model."""
    commands = [part for block in blocks_of("README.md") if block.language == "bash" for part in statements(block.text)]
    [words] = [part.words() for part in commands if part.words()[:2] == ["vllm", "serve"]]
    return words[3:]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    folder = tmp_path_factory.mktemp("docs")
    world = World(folder, is_shared=True)
    save_tokenizer(world.base)
    options = ("--no-skip-tokenizer-init", "--logprobs-mode", "processed_logprobs", *options_of_readme())
    started = [
        ServerProcess(
            world.base, folder / f"node{number}.log", *options, DELTA_SNAPSHOT_STAGE_DIR=str(folder / "stage")
        )
        for number in (1, 2)
    ]
    with servers(*started):
        world.servers = [process.client.url for process in started]
        with Library(world) as found:
            yield found


@pytest.mark.parametrize("block", parameters(needs_engine=True))
def test_block(block: Block, library: Library) -> None:
    library.read(block)
