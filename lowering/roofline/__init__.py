"""What bounds a captured step on a device: operations and bytes of each operator that a call runs, and how long the
device needs for them at least; and how many slots each expert has. Imports the planner; nothing of capture."""

from moebius.lowering.roofline.meter import METER
from moebius.lowering.roofline.page import render
from moebius.lowering.roofline.slots import RECORDER
