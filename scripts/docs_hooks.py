"""Hooks of mkdocs: pages written from the code, and pages that stand at the top of the repository.

The page on Python is a notebook, too. `make docs` builds the site. Nothing is fetched, and nothing
is written into docs/.
"""

import json
import re
from pathlib import Path
from typing import Any

from reference import pages

ROOT = Path(__file__).parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
PAGES |= {"CHANGELOG.md": "changelog.md", "README.md": "index.md"}


def cut(file: str, part: str) -> str:
    """Return the part of a file between the comments that mark it."""
    text = (ROOT / file).read_text(encoding="utf-8")
    mark = "<!-- --8<-- [{}:{}] -->\n"
    return text.split(mark.format("start", part))[1].split(mark.format("end", part))[0]


def move_links(text: str) -> str:
    """Return a text of the top folder with links as they are among the pages."""
    text = re.sub(r"(\]\(|src=\"|srcset=\")docs/", r"\1", text)
    for file, page in PAGES.items():
        anchor = "glossary.md" if file == "CONTRIBUTING.md" else page
        text = re.sub(rf"\]\((?:\.\./)?{file}#glossary\)", f"]({anchor})", text)
        text = re.sub(rf"\]\((?:\.\./)?{file}(#[\w-]+)?\)", rf"]({page}\1)", text)
    return text


def split_picture(match: re.Match[str]) -> str:
    """Return a picture as two images: the page's own switch, not the system's, chooses one."""
    dark, light, alt = re.findall(r'(?:srcset|src|alt)="([^"]*)"', match[0])
    return f"![{alt}]({light}#only-light)\n![{alt}]({dark}#only-dark)"


def top_pages() -> dict[str, str]:
    """Return the pages that are files of the top folder; the glossary has a page of its own."""
    glossary = cut("CONTRIBUTING.md", "glossary")
    texts = {
        page: (ROOT / file).read_text(encoding="utf-8")
        for file, page in PAGES.items()
        if page != "index.md"
    }
    link = "Terms are defined in the [glossary](glossary.md).\n"
    texts["contributing.md"] = texts["contributing.md"].replace(glossary, link)
    texts["glossary.md"] = f"# Glossary\n\n{glossary}"
    return {name: move_links(text) for name, text in texts.items()}


def make_notebook(page: str) -> str:
    """Return a page as a Jupyter notebook: Python as cells, text blocks as their outputs."""
    cells: list[dict[str, Any]] = []
    for part in re.split(r"(^```\w+\n.*?^```$)", page, flags=re.DOTALL | re.MULTILINE):
        head, _, body = part.strip().partition("\n")
        text = body.removesuffix("```").rstrip()
        cell = {"id": f"cell-{len(cells)}", "metadata": {}}
        if head == "```python":
            cells.append(
                cell | {"cell_type": "code", "source": text, "execution_count": None, "outputs": []}
            )
        elif head == "```text":
            output = {"output_type": "stream", "name": "stdout", "text": f"{text}\n"}
            cells[-1]["outputs"].append(output)
        elif part.strip():
            cells.append(cell | {"cell_type": "markdown", "source": part.strip()})
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}
    return json.dumps(book, ensure_ascii=False, indent=1) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and the notebook."""
    from mkdocs.structure.files import File

    for name, text in (pages() | top_pages()).items():
        files.append(File.generated(config, name, content=text))
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "python.ipynb", content=make_notebook(page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Include parts of other files, and turn links to the top folder into links to pages."""
    markdown = re.sub(
        r"<!-- include ([\w.]+):(\w+) -->", lambda match: cut(match[1], match[2]), markdown
    )
    markdown = re.sub(r"<picture>.*?</picture>", split_picture, markdown, flags=re.DOTALL)
    return move_links(markdown) if "/" not in page.file.src_uri else markdown
