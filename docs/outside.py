"""For the site: links to files that are not pages (`../examples/generate.py`) become the file's name."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(named, markdown)


def named(link: re.Match[str]) -> str:
    return f"`{link[2]}`" if link[1].strip("`") == link[2] else f"{link[1]} (`{link[2]}`)"
