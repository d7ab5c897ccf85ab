"""The training step's own nodes: what a graph needs to hold backward and optimizer beside the forward pass.

May live here: functions that stand in a step's graph for what autograd and optimizers do to ``.grad`` and ``.data``,
and the passes over them; a user's autograd.Function and gradient hooks; branches on data; text and printed lines.
``Tensor.backward`` itself is a node as it is.
"""

from moebius.lowering.autocast import autocast_now, leave_autocast
from moebius.lowering.step.absent import ROLES, going_on, is_backward, role_of, treats_each_alone
from moebius.lowering.step.asked import ASKED
from moebius.lowering.step.assumed_sizes import UnequalSizesError, require_equal, rows_between
from moebius.lowering.step.bars import bar_call
from moebius.lowering.step.branches import BranchError, attempted, chosen, either, require_branch
from moebius.lowering.step.draws import draw, draw_array, draw_below, draw_numpy
from moebius.lowering.step.function_transforms import function_transform
from moebius.lowering.step.functions import (
    autograd_function,
    backward_place,
    by_autocast,
    put_back_mode,
    set_backward,
)
from moebius.lowering.step.gradients import (
    MissingGradientError,
    ReachedElsewhereError,
    gradient_of,
    keep,
    require_given,
    require_gradients,
    require_known,
    set_data,
    set_gradient,
)
from moebius.lowering.step.hooks import RankHook, asks_of_each, backward_with_hooks, observed, require_accumulated
from moebius.lowering.step.in_python import InPythonError, asks_plain_python
from moebius.lowering.step.notes import new_notes, note_side
