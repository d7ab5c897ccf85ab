"""The report of one captured callable: what is known of it, with its forms for people and programs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from .model import Findings


class Report(Findings):
    __doc__ = Findings.__doc__

    def __str__(self) -> str:
        """The report as text: with colour on a terminal, plain anywhere else."""
        from .text import render

        terminal = bool(getattr(sys.stdout, "isatty", lambda: False)())
        width = shutil.get_terminal_size((110, 40)).columns if terminal else 110
        return render(self, width=width, color=terminal)

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON text (``result`` left out), also written to ``path`` when that is given."""
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one self-contained HTML file (no network, no other files); returns its path."""
        from .page import write

        return write([self], path)
