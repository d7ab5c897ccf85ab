"""Passes over captured graphs. Here live what capture hands down (graph.py), the passes with their contracts
(pipeline.py lists them), what they share (operators.py: one name for each spelling; aliasing.py: who writes where;
values.py), the rooms experts/ and distribution/, and the backends that run a lowered graph. Nothing here imports
capture."""

from __future__ import annotations

from moebius.lowering.aliasing import Storage, computes, only_computes, repeats_write, spelled_in_place, writes_into
from moebius.lowering.backends import OWN, check_backend
from moebius.lowering.entry import check_options, lower, where_raised
from moebius.lowering.errors import ContractError, LoweringError, UnknownBackendError, WholeStepRefusedError
from moebius.lowering.experts.rewrite import DIFFERENT
from moebius.lowering.graph import CapturedGraph, ExpertRegion, Lowered, LoweringOptions, expert_loop, skip_iteration
from moebius.lowering.operators import is_pure
from moebius.lowering.repeats import whole_code
from moebius.lowering.torch_private import may_write, returns_nothing
from moebius.lowering.values import apply, copy_node
from moebius.lowering.what_blocks import Blockers, Blocking
