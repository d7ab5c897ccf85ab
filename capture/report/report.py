"""The report of one captured callable: what is known of it, with its forms for people and programs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from html import escape
from pathlib import Path

from .model import Findings


class Report(Findings):
    # (its printed form is the report; ``repr`` is one line)
    __doc__ = Findings.__doc__

    def __str__(self) -> str:
        """The report as text: with colour on a terminal (not with ``NO_COLOR``), plain anywhere else; as wide as
        the terminal, or as ``COLUMNS`` says, of 60 columns at least."""
        from .text import render

        terminal = bool(getattr(sys.stdout, "isatty", lambda: False)())
        width = max(shutil.get_terminal_size((110, 40)).columns, 60)
        return render(self, width=width, color=terminal and not os.environ.get("NO_COLOR"))

    def __repr__(self) -> str:
        return f"<Report of {self.name}: {self.verdict}>"

    def _repr_html_(self) -> str:
        """In a notebook: the page, in a frame of its own."""
        from .page import page

        return f'<iframe srcdoc="{escape(page([self]))}" style="width:100%;height:40rem;border:0"></iframe>'

    def diff(self, other: Report) -> str:
        """What is other in a later report of the same callable, in lines; "" where nothing is. Times are left out."""
        from .differences import difference

        return difference(self, other)

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON text (``result`` left out), also written to ``path`` when that is given."""
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_trace(self, path: str | Path) -> Path:
        """Write what capture and the native parts took, for chrome://tracing and ui.perfetto.dev; returns its path."""
        from .timeline import write

        return write(self, path)

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one self-contained HTML file (no network, no other files); returns its path."""
        from .page import write

        return write([self], path)
