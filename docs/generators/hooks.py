"""What mkdocs calls while it builds the site: pages made from the code join those that people wrote.

    docs/*.md  --------------------------+
    flag_pages, command_pages, ... ------+--> mkdocs --> build/site
    CHANGELOG.md ------------------------+

A page of `nav` that does not exist is left out, and one that `nav` does not name goes under "More": no page can break
the build by landing before or after its entry. Links into the repository are checked, and shown as plain text.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout's package, wherever another one is installed

from docs.generators import api_page, case_page, command_pages, flag_pages, message_page  # noqa: E402


def quickstart() -> str:
    """The README's sections on the first runs."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sections = {part.split("\n", 1)[0]: part for part in re.split(r"^## ", readme, flags=re.M)}
    text = "# " + sections["Quickstart"] + "## " + sections["Training by hand"] + "## " + sections["Other models"]
    return text.replace("](docs/", "](")


# page -> its text
GENERATED = {
    "flags.md": flag_pages.page,
    "commands.md": command_pages.page,
    "api.md": api_page.index,
    **{f"api_{room}.md": partial(api_page.page, room) for room in api_page.ROOMS},
    "messages.md": message_page.page,
    "quickstart.md": quickstart,
    "cases.md": case_page.page,
    "changes.md": lambda: (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
}


def on_config(config: Any) -> Any:
    """`nav` without pages that are not there, and with those that it does not name."""
    there = {path.name for path in (ROOT / "docs").glob("*.md")} | set(GENERATED)
    sections = [(title, pages) for section in config.nav for title, pages in section.items()]
    rooms = [{room: f"api_{room}.md"} for room in api_page.ROOMS]
    more = sorted(
        there - {page for _, pages in sections for page in pages} - {f"api_{room}.md" for room in api_page.ROOMS}
    )
    nav = [{title: [page for page in pages if page in there]} for title, pages in sections]
    config.nav = [*nav, {"Public names, room by room": rooms}, *([{"More": more}] if more else [])]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages."""
    for name, page in GENERATED.items():
        files.append(File.generated(config, name, content=page()))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Comments that tell tests how to run a block go; links into the repository become their text."""
    text = re.sub(r"^<!-- (?:run|check|shown|before)\b.*?-->\n", "", text, flags=re.M | re.S)

    def plain(link: re.Match[str]) -> str:
        if not (ROOT / "docs" / link[2]).exists():
            raise PluginError(f"{page.file.src_uri}: {link[2]} does not exist")
        return link[1]

    return re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#]+)(?:#[^)]*)?\)", plain, text)
