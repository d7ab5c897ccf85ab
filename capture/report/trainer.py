"""A callback for Hugging Face's ``Trainer``: what became of its captured step, said once. Imports transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback


class ReportOnce(TrainerCallback):
    """Prints the report of all that was captured at the end of one step, and then no more.

    step: of which one; by the second one all is captured that comes in each. html: also write the page there.
    """

    def __init__(self, step: int = 2, html: str | Path | None = None):
        from ..api import watch_captures

        self.step, self.html, self.done = step, html, False
        watch_captures()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.done or state.global_step < self.step or not state.is_world_process_zero:
            return
        from ..api import captured_functions
        from .page import write

        self.done = True
        reports = [one.report() for one in captured_functions()]
        reports = [report for report in reports if report.graphs or report.breaks or report.why]
        for report in reports:
            print(f"\n{report}")
        if not reports:
            print("moebius: nothing was captured; docs/reading-a-report.md says how a Trainer's step is")
        if self.html is not None:
            write(reports, self.html)
