# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: what pages link to outside of docs/ becomes part of the site.

On a code host `../ops/alerts.yaml` is right; in the site that file is under `repository/`. A link to a file that does
not exist is left as it is, so that the strict build fails on it. Folders are named, not linked.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(\.\./((?!\.)[^)#\s]+)\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the files that pages link to."""
    wanted = set()
    for page in files.documentation_pages():
        if "/" not in page.src_uri:
            wanted |= {match[2] for match in _LINK.finditer(page.content_string)}
    for path in sorted(wanted):
        if (_ROOT / path).is_file():
            files.append(File.generated(config, _place(path), abs_src_path=str(_ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point links there."""
    return markdown if "/" in page.file.src_uri else _LINK.sub(_moved, markdown)


def _moved(match: re.Match[str]) -> str:
    text, path = match[1], match[2]
    if (_ROOT / path).is_dir():
        return text
    return f"[{text}]({_place(path)})" if (_ROOT / path).is_file() else match[0]


def _place(path: str) -> str:
    # Pages of the repository are shown as text: their own links lead elsewhere.
    return f"repository/{path}.txt" if path.endswith(".md") else f"repository/{path}"
