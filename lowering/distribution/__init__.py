"""Where experts live and how tokens reach them. What may live here: plans and their arithmetic, the sharded form of a
parameter and how parameters move to the ranks, the exchange operators, and the pass that puts them into a graph.

One program on every rank, each with its own part of the batch. Dense compute is on that part alone; experts are split
over one mesh axis, and so are their gradients and optimizer state. At an expert region rows travel by uneven all-to-all
to the ranks that own their experts, and back. Where a backward pass ends, gradients are averaged (reduce.py): the
result is that of one process on the mean of the ranks' losses. No token is dropped.

How a caller (capture) uses it:

1. lower with ``LoweringOptions(mesh=..., plan=...)``; the lowering calls ``place(gm, options)`` once expert regions are
   ``moebius.kernels.experts`` calls. The result is right whether or not parameters were placed.
2. give it each input as ``input_conversions(gm, options)`` says, by ``to_graph_input``.
3. before anything of a cold call has run, ``place_parameters`` those that ``parameters_to_place(gm)`` names: where some
   moved to their ranks their class has changed: drop the capture and capture again.
4. ``average_gradients(modules, tensors, mesh, plan)`` before the first call runs, with all that it trains.

Everything here that says "Collective" must be called on every rank of the mesh, in the same order.
"""
from moebius.lowering.distribution import simulate
from moebius.lowering.distribution.channels import Traffic, traffic
from moebius.lowering.distribution.errors import DistributionError, PlacementError, RanksDisagreeError
from moebius.lowering.distribution.place import (
    input_conversions,
    parameters_to_place,
    place,
)
from moebius.lowering.distribution.placement import collect_parameters, place_parameters, place_state, to_graph_input
from moebius.lowering.distribution.plan import Plan, resolve_plan
from moebius.lowering.distribution.program import parts_of
from moebius.lowering.distribution.reduce import average_gradients, is_averaged
from moebius.lowering.distribution.sharded import Sharded
from moebius.lowering.distribution.steps import look_at_optimizers, nothing_unseen
from moebius.lowering.distribution.weighing import weigh_by_tokens
from moebius.lowering.planner.traffic import Bytes, RegionShape, bytes_for, expected_bytes
