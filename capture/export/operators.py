"""The operators that a file may name, and nothing else: what is not in these lists is neither written nor run.

A name says where the operator is found by everybody (``torch.nn.functional.linear``, ``operator.add``), so that a file
does not depend on where one torch version keeps it. None of the operators reads or writes files, takes a Python
callable, or gives out or takes in memory that is not a tensor's.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from moebius.kernels import experts, experts_rows
from moebius.lowering.experts.sorting import draw_noise, project, sort_slots
from moebius.lowering.experts.stacking import (
    block_experts,
    block_offsets,
    blocks_apart,
    experts_that_ran,
    in_set_order,
    join_blocks,
    of_iterations_that_ran,
    rows_if,
    stack_experts,
)
from moebius.lowering.experts.weight_concat import experts_of_parts
from moebius.lowering.graph import expert_loop, skip_iteration
from moebius.lowering.step import (
    attempted,
    autograd_function,
    backward_place,
    backward_with_hooks,
    by_autocast,
    chosen,
    function_transform,
    gradient_of,
    keep,
    leave_autocast,
    require_accumulated,
    require_branch,
    require_equal,
    require_gradients,
    rows_between,
    set_backward,
    set_data,
    set_gradient,
)
from moebius.lowering.step.arrays import array_item, array_numbers
from moebius.lowering.step.gathered import cat_present, how_many, no_rows
from moebius.lowering.torch_private import assert_holds, foreach_operators, set_grad_enabled

from ..errors import LoadError

# Names of operators as functions of torch or torch.nn.functional and as methods; with or without a trailing underscore.
OPERATORS = frozenset(
    """
    abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr all allclose amax amin aminmax angle any arange
    arccos argmax argmin argsort argwhere asin asinh atan atan2 atanh atleast_1d atleast_2d baddbmm bernoulli bincount
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm broadcast_tensors
    broadcast_to bucketize cat cdist ceil chunk clamp clamp_max clamp_min clip clone column_stack complex concat
    concatenate conj conj_physical contiguous copy copysign cos cosh count_nonzero cross cummax cummin cumprod cumsum
    detach diag diag_embed diagonal diff digamma dist div divide dot dstack einsum empty empty_like eq equal erf erfc
    erfinv exp exp2 expand expand_as expm1 exponential eye fill fill_diagonal flatten flip fliplr flipud float_power
    floor floor_divide fmax fmin fmod frac full full_like gather ge gelu geometric greater greater_equal gt heaviside
    histc hstack hypot imag index_add index_copy index_fill index_put index_reduce index_select inner isclose isfinite
    isin isinf isnan isneginf isposinf kron kthvalue le lerp less less_equal lgamma linspace log log10 log1p log2
    log_normal log_softmax logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or logical_xor logit
    logspace logsumexp lt masked_fill masked_scatter masked_select matmul max maximum mean median meshgrid min minimum
    mm mode moveaxis movedim msort mul multinomial multiply mv mvlgamma nan_to_num nanmean nanmedian nanquantile nansum
    narrow ne neg negative nextafter nonzero norm normal not_equal ones ones_like outer permute polar positive pow prod
    put quantile rad2deg rand rand_like randint randint_like randn randn_like random randperm ravel real reciprocal relu
    remainder renorm repeat repeat_interleave reshape reshape_as roll rot90 round rsqrt rsub scalar_tensor scatter
    scatter_add scatter_reduce searchsorted select select_scatter sgn sigmoid sign signbit sin sinc sinh slice_scatter
    softmax softplus sort split split_with_sizes sqrt square squeeze stack std std_mean sub subtract sum swapaxes
    swapdims t take take_along_dim tan tanh tensor_split tensordot tile topk trace transpose trapezoid tril tril_indices
    triu triu_indices true_divide trunc unbind unflatten uniform unique unique_consecutive unsqueeze vander var var_mean
    vdot vsplit hsplit vstack where xlogy zero zeros zeros_like
    is_nonzero numel is_floating_point is_complex
    adjoint arccosh arcsin arcsinh arctan arctan2 arctanh atleast_3d binomial block_diag cartesian_prod channel_shuffle
    cholesky_inverse cholesky_solve combinations corrcoef cov cumulative_trapezoid deg2rad det diagflat diagonal_scatter
    dsplit fix frexp gcd ger gradient i0 igamma igammac inverse is_conj is_same_size is_signed isreal istft lcm ldexp
    logdet matrix_exp matrix_power nonzero_static pinverse poisson polygamma resolve_conj resolve_neg row_stack slogdet
    stft trapz unravel_index view_as_complex view_as_real
    """.split()
)
METHODS = OPERATORS | frozenset(
    """
    backward bfloat16 bool byte cdouble cfloat char cpu cuda dim double element_size float half int is_contiguous item
    long ndimension nelement new_empty new_full new_ones new_tensor new_zeros requires_grad requires_grad_ retain_grad
    short size stride sum_to_size to tolist type type_as view view_as T masked_fill_ unfold
    """.split()
)
DUNDERS = frozenset(
    """
    __abs__ __add__ __and__ __bool__ __contains__ __div__ __eq__ __float__ __floordiv__ __ge__ __getitem__ __gt__
    __iadd__ __iand__ __idiv__ __ifloordiv__ __imod__ __imul__ __index__ __int__ __invert__ __ior__ __ipow__ __isub__
    __itruediv__ __ixor__ __le__ __len__ __lshift__ __lt__ __matmul__ __mod__ __mul__ __ne__ __neg__ __or__ __pos__
    __pow__ __radd__ __rand__ __rdiv__ __rfloordiv__ __rmatmul__ __rmod__ __rmul__ __ror__ __rpow__ __rshift__ __rsub__
    __rtruediv__ __rxor__ __setitem__ __sub__ __truediv__ __xor__
    """.split()
)
FUNCTIONAL = OPERATORS | frozenset(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d alpha_dropout avg_pool1d avg_pool2d batch_norm binary_cross_entropy
    binary_cross_entropy_with_logits celu conv1d conv2d conv3d cosine_similarity cross_entropy dropout dropout1d
    dropout2d elu embedding embedding_bag feature_alpha_dropout gaussian_nll_loss glu group_norm gumbel_softmax
    hardshrink hardsigmoid hardswish hardtanh hinge_embedding_loss huber_loss instance_norm interpolate kl_div l1_loss
    layer_norm leaky_relu linear local_response_norm logsigmoid max_pool1d max_pool2d mish mse_loss nll_loss normalize
    one_hot pad pairwise_distance poisson_nll_loss prelu relu6 rms_norm rrelu scaled_dot_product_attention selu silu
    smooth_l1_loss soft_margin_loss softmin softshrink softsign tanhshrink threshold triplet_margin_loss unfold fold
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d affine_grid avg_pool3d bilinear conv_transpose1d
    conv_transpose2d conv_transpose3d cosine_embedding_loss ctc_loss dropout3d grid_sample lp_pool1d lp_pool2d
    margin_ranking_loss max_pool3d multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss pdist
    pixel_shuffle pixel_unshuffle
    """.split()
)
LINALG = (
    "cholesky cond cross det diagonal eig eigh eigvals eigvalsh inv lstsq lu lu_factor lu_solve matmul matrix_exp "
    "matrix_norm matrix_power matrix_rank multi_dot norm pinv qr slogdet solve solve_triangular svd svdvals vander "
    "vecdot vector_norm"
).split()
FFT = "fft fft2 fftn fftshift hfft ifft ifft2 ifftn ifftshift ihfft irfft irfft2 irfftn rfft rfft2 rfftn".split()
SPECIAL = (
    "entr erfcx gammainc gammaincc gammaln i0e i1 i1e log_ndtr ndtr ndtri polygamma psi xlog1py xlogy zeta"
).split()
PYTHON = (
    "abs add and_ concat contains eq floordiv ge getitem gt iadd iand ifloordiv imul index inv invert ior ipow isub "
    "itruediv le lshift lt matmul mod mul ne neg not_ or_ pos pow rshift setitem sub truediv truth xor is_ is_not"
).split()
MATH = (
    "acos acosh asin asinh atan atan2 atanh ceil comb copysign cos cosh degrees erf erfc exp exp2 expm1 fabs floor "
    "fmod frexp fsum gamma gcd hypot isclose isfinite isinf isnan isqrt lcm ldexp lgamma log log10 log1p log2 modf "
    "nextafter pow prod radians remainder sin sinh sqrt tan tanh trunc ulp"
).split()
BUILTINS = {f.__name__: f for f in (abs, bool, complex, divmod, float, int, max, min, pow, round, sum, len)}
MADE = ("tensor", "as_tensor")  # of numbers; torch's functions only, copies or a tensor's own memory
SWITCHES = (
    "set_autocast_enabled", "set_autocast_dtype", "set_autocast_cache_enabled", "clear_autocast_cache",
    "autocast_increment_nesting", "autocast_decrement_nesting", "is_grad_enabled", "sym_max", "sym_min", "sym_not",
    "sym_int", "sym_float", "sym_sqrt", "sym_ite",
)  # fmt: skip
ATTRIBUTES = frozenset(
    "shape dtype device T mT H mH ndim real imag grad data is_leaf requires_grad layout itemsize nbytes values indices "
    "start stop step".split()
)
OURS: dict[str, Callable[..., Any]] = {
    f"moebius.{function.__name__}": function
    for function in (
        expert_loop, skip_iteration, autograd_function, backward_place, by_autocast, function_transform, leave_autocast,
        backward_with_hooks, gradient_of, keep, require_accumulated, require_branch, require_equal, require_gradients,
        set_backward, set_data, set_gradient, experts, experts_rows, experts_of_parts, stack_experts, sort_slots,
        project, draw_noise, join_blocks, in_set_order, chosen, array_item, array_numbers, cat_present, how_many,
        no_rows, block_experts, block_offsets, experts_that_ran, of_iterations_that_ran, rows_if, blocks_apart,
        rows_between,
    )
} | {
    "torch.Size": torch.Size,
    "torch.nn.Parameter": torch.nn.Parameter,
    "torch.set_grad_enabled": set_grad_enabled,
    "torch.assert_holds": assert_holds,
    "torch.autograd.grad": torch.autograd.grad,
    "torch.autograd.backward": torch.autograd.backward,
}  # fmt: skip


@functools.cache
def functions() -> dict[str, Callable[..., Any]]:
    """Every allowed function that this torch has, by its name in files."""
    found = dict(OURS)
    found.update({f"builtins.{name}": f for name, f in BUILTINS.items()})
    for holder, prefix, names in (
        (torch, "torch", (*both(OPERATORS), *MADE, *SWITCHES)),
        (torch.nn.functional, "torch.nn.functional", both(FUNCTIONAL)),
        (torch.linalg, "torch.linalg", LINALG),
        (torch.fft, "torch.fft", FFT),
        (torch.special, "torch.special", SPECIAL),
        (operator, "operator", PYTHON),
        (math, "math", MATH),
    ):
        for name in names:
            function = getattr(holder, name, None)
            if callable(function):
                found[f"{prefix}.{name}"] = function
    numbers = [n for n in found if n.startswith(("builtins.", "operator.", "math.")) or n == "moebius.chosen"]
    found.update({f"moebius.attempted.{n}": attempted(found[n]) for n in numbers})
    found.update({f"torch.{name}": f for name, f in foreach_operators().items()})
    return found


@functools.cache
def names() -> dict[Any, str]:
    """The name in files of each allowed function: the first of several."""
    found: dict[Any, str] = {}
    for name, function in functions().items():
        found.setdefault(function, name)
    return found


def both(operators: Iterable[str]) -> list[str]:
    """Each name, and that of the form in place."""
    return [form for name in sorted(operators) for form in (name, f"{name}_")]


def is_method(name: str) -> bool:
    """Whether a graph in a file may call this method of a tensor."""
    return name in DUNDERS or name in METHODS or (name.removesuffix("_") in METHODS and not name.endswith("__"))


def find(name: str, allow: Iterable[str] = ()) -> Callable[..., Any]:
    """The function of this name. ``allow``: names of custom operators that the caller trusts. Raises LoadError."""
    function = functions().get(name)
    if function is not None:
        return function
    if "::" in name:
        return find_custom(name, frozenset(allow))
    prefix, _, last = name.rpartition(".")
    if prefix.startswith(("torch", "operator", "math")) and last.removesuffix("_") in FUNCTIONAL | METHODS:
        raise LoadError(f"this torch ({torch.__version__}) has no operator {name}")
    raise LoadError(f"the operator {name!r:.80} is not one that a file may name")


def find_custom(name: str, allow: frozenset[str]) -> Callable[..., Any]:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    if f"{namespace}::{base}" not in allow:
        raise LoadError(
            f"it needs the custom operator {namespace}::{base}; import the library that registers it and pass "
            f"load(path, allow=[{f'{namespace}::{base}'!r}]) if you trust it"
        )
    packet = getattr(getattr(torch.ops, namespace), base, None)
    found = getattr(packet, overload or "default", None)
    if found is None:
        raise LoadError(f"the custom operator {name} is not registered; import the library that defines it first")
    return found
