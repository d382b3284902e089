"""The pages say what the code has: every error has its entry, and no link of the README leads nowhere."""

import re
from pathlib import Path

import pytest

from vllm_delta_snapshot import errors
from vllm_delta_snapshot.drive import ServerError
from vllm_delta_snapshot.errors import DeltaSnapshotError

ROOT = Path(__file__).resolve().parents[2]


def test_every_error_has_its_entry() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    headings = set(re.findall(r"^### (\w+)$", page, re.MULTILINE))
    kinds = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)} - {"Recovery"}
    assert all(issubclass(getattr(errors, name), DeltaSnapshotError) for name in kinds)
    assert headings == kinds | {ServerError.__name__}


@pytest.mark.parametrize("page", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))])
def test_links_to_files_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    assert links or page != "README.md"
    lost = [link for link in links if "://" not in link and not (ROOT / page).parent.joinpath(link).exists()]
    assert lost == []
