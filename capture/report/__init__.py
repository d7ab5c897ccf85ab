"""The report: what one captured call became, and its forms for people (terminal text, HTML) and programs (JSON).

What may live here: plain records, and their rendering. Nothing here captures, lowers or runs anything, and nothing here
imports torch, so a report can be made, read and tested anywhere.
"""

from .records import GraphBreak, Guard, Recompile, Stats
from .report import Report

__all__ = ["GraphBreak", "Guard", "Recompile", "Report", "Stats"]
