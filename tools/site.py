"""Additions of `make docs` to the pages of docs/: README, CONTRIBUTING and the format, the commands and the API."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "artifacts/FORMAT.md": "format.md"}
COMMANDS = """# Commands

Every command with all its options, as `--help` shows them. [Reference](reference.md#commands) has the short list.

::: mkdocs-click
    :module: ling3export.cli.main
    :command: main
    :prog_name: ling3export
    :depth: 1
    :style: table
    :list_subcommands: true

::: mkdocs-click
    :module: ling3export.runners.cli.main
    :command: main
    :prog_name: ling3-runner
    :depth: 1
    :style: table
    :list_subcommands: true
"""
API = """# Python API

The public classes, from their docstrings.

::: ling3export.runners.engine.engine.Engine

::: ling3export.runners.engine.config.EngineConfig

::: ling3export.runners.engine.request.Request

::: ling3export.runners.engine.request.Sampling

::: ling3export.runners.engine.request.Completion

::: ling3export.foundation.errors
"""
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> None:
    """Adds the decisions, the log, and pages of docs/ that mkdocs.yml does not name to the navigation."""
    named = re.findall(r"[\w-]+\.md", str(config.nav))
    more = sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name not in named)
    config.nav.extend([{"More": more}] if more else [])
    for title, folder in (("Decisions", "decisions"), ("Log", "log")):
        pages = sorted((ROOT / "docs" / folder).glob("*.md"))
        config.nav.append({title: [page.relative_to(ROOT / "docs").as_posix() for page in pages]})


def on_files(files: Files, config: Any) -> Files:
    """Adds pages from other folders, and generated ones."""
    texts = {name: rewritten((ROOT / source).read_text(), source) for source, name in PAGES.items()}
    for name, text in (texts | {"commands.md": COMMANDS, "api.md": API}).items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Makes links out of docs/ lead to the pages made from those files."""
    source = page.file.src_uri
    return markdown if source in PAGES.values() else rewritten(markdown, f"docs/{source}")


def rewritten(markdown: str, source: str) -> str:
    """``markdown`` of the file ``source``, with links to files of the tree changed to pages of the site.

    A link to a file that is no page, such as LICENSE, becomes its text.
    """
    depth = "../" * (source.removeprefix("docs/").count("/") if source.startswith("docs/") else 0)

    def page(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if "://" in target:
            return link[0]
        path = (ROOT / source).parent.joinpath(target).resolve().relative_to(ROOT)
        if path.as_posix() in PAGES:
            return f"[{text}]({depth}{PAGES[path.as_posix()]}{anchor})"
        if path.parts[0] != "docs":
            return text
        if (ROOT / path).is_dir():
            path = min((ROOT / path).glob("*.md")).relative_to(ROOT)
        return f"[{text}]({depth}{path.relative_to('docs').as_posix()}{anchor})"

    return LINK.sub(page, markdown)
