"""What bounds a captured step on a device: operations and bytes of each operator that a call runs, and how long the
device needs for them at least. Imports the planner's devices; nothing of capture."""

from moebius.lowering.roofline.meter import METER
from moebius.lowering.roofline.page import render

__all__ = ["METER", "render"]
