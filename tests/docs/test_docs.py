"""Every block of README.md and docs/ is run, or checked as far as it can be; those that need an engine: tests/vllm."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.docs.blocks import LANGUAGES, ROOT, Block, blocks_of, pages, parameters, read_blocks
from tests.docs.code import check_code
from tests.docs.commands import SLOW_TARGETS, can_run, check_cli, check_make, check_pip, check_verb_and_options
from tests.docs.data import check_data
from tests.docs.reading import Library
from tests.docs.shell import Shell, statements
from tests.docs.world import World


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    with Library(World(tmp_path_factory.mktemp("docs"))) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("block", parameters(needs_engine=False))
def test_block(block: Block, library: Library) -> None:
    library.read(block)


@pytest.mark.parametrize("page", pages())
def test_every_fence_of_a_page_says_what_it_is(page: str) -> None:
    unknown = [f"{block} {block.language!r}" for block in blocks_of(page) if block.language not in LANGUAGES]
    assert unknown == []


@pytest.mark.parametrize("page", pages())
def test_commands_in_running_text_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for command in re.findall(r"`delta-snapshot ([a-z][^`]*)`", text):
        check_verb_and_options(command.replace("\\|", "|").split())
    for command in re.findall(r"`make ([a-z][^`]*)`", text):
        check_make(["make", *re.sub(r"<[^>]*>", "x", command).split()])


def test_no_block_is_marked_as_not_run_that_could_be() -> None:
    marked = [block for page in pages() for block in blocks_of(page) if block.not_run and block.language == "bash"]
    assert [str(block) for block in marked if all(can_run(part.words()) for part in statements(block.text))] == []


def test_targets_that_are_not_run_here_exist() -> None:
    check_make(["make", *SLOW_TARGETS])


# --- the machinery: that it fails when it should


def read(text: str) -> list[Block]:
    return list(read_blocks("page.md", text))


def test_reader_finds_language_line_reason_and_blocks_inside_lists() -> None:
    text = "# A\n<!-- not run: needs a GPU -->\n```bash\na\n```\n* b\n\n"
    text += "  ```python\n  if 1:\n      c\n  ```\n~~~\nd\n~~~\n"
    found = [(block.language, block.line, block.text, block.not_run) for block in read(text)]
    assert found == [
        ("bash", 4, "a\n", "needs a GPU"),
        ("python", 9, "if 1:\n    c\n", None),
        ("", 13, "d\n", None),
    ]


@pytest.mark.parametrize("text", ["```bash\na\n", "<!-- not run: x -->\n\n```bash\na\n```\n"])
def test_reader_refuses_what_it_might_misread(text: str) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:1|page\.md:2"):
        read(text)


def test_commands_are_split_where_they_end() -> None:
    found = list(statements("a \\\n  b\n\n# c\nfor x in 1 2; do\n  d\ndone\ncat <<E\nf\nE\ng\n"))
    assert [(part.line, part.text.split("\n")[0]) for part in found] == [
        (0, "a \\"),
        (4, "for x in 1 2; do"),
        (7, "cat <<E"),
        (10, "g"),
    ]
    with pytest.raises(AssertionError, match="unexpected"):
        list(statements("if true; then\n"))


def test_command_that_exits_otherwise_than_said_fails(tmp_path) -> None:
    shell = Shell(tmp_path, tmp_path / ".state", {})
    assert shell.run(list(statements("export A=1\n(exit 3)  # exits with 3")), timeout_s=10) == ""
    assert shell.run(list(statements("echo $A")), timeout_s=10) == "1\n"
    for script in ("(exit 3)", "true  # exits with 1", "echo $MISSING", "false | cat"):
        with pytest.raises(AssertionError, match=r"line 0: exit status|unbound"):
            shell.run(list(statements(script)), timeout_s=10)


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (check_cli, ["lok", "/run"]),
        (check_cli, ["log", "/run", "--verbose"]),
        (check_cli, ["diff", "/run"]),
        (check_cli, ["plan", "--params", "many", "--gbps", "10"]),
        (check_verb_and_options, ["prune", "SYNC_DIR", "--keep-all"]),
        (check_make, ["make", "demos"]),
        (check_make, ["make", "demo", "TORCH=1"]),
        (check_pip, ["vllm-delta-snapshot[cli,plots]"]),
    ],
)
def test_wrong_commands_are_found(check, wrong) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        "from trainer_hooks import DeltaPublishers",
        "from trainer_hooks.integrations.skyrl import use_deltas",
        "from trainer_hooks import UpkeepPolicy\nUpkeepPolicy(anchors_every=1)",
    ],
)
def test_wrong_names_and_arguments_are_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check_code(wrong)


POD = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: [{name: a, image: b, %s}]}"


@pytest.mark.parametrize(
    "wrong",
    [
        "kind: ConfigMap\napiVersion: v1\nmetadata: {name: A_b}",
        POD % "volumeMounts: [{name: c}]",
        POD % "command: [delta-snapshot, follow, --sync, x]",
    ],
)
def test_wrong_manifests_are_found(wrong: str) -> None:
    check_data("yaml", POD % "args: []")
    with pytest.raises(AssertionError):
        check_data("yaml", wrong)
