"""One name for each operator, however it was spelled: function, method, Python operator, attribute.

:func:`read_call` turns an FX node into a :class:`Call` (canonical name, arguments bound by name), from the tables
below. The proofs look at Calls only, so that ``torch.greater(m, 0)``, ``m.gt(0)`` and ``m > 0`` are one thing to them.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from moebius.lowering.experts.sorting import draw_noise, project, sort_slots
from moebius.lowering.experts.stacking import (
    block_experts,
    block_offsets,
    blocks_apart,
    experts_that_ran,
    in_set_order,
    is_left,
    join_blocks,
    of_iterations_that_ran,
    pick,
    rows_if,
    stack_experts,
)
from moebius.lowering.graph import expert_loop, skip_iteration
from moebius.lowering.memo import MEMO
from moebius.lowering.step.arrays import array_item, array_numbers
from moebius.lowering.step.assumed_sizes import require_equal, rows_between
from moebius.lowering.step.branches import chosen, require_branch
from moebius.lowering.step.gathered import cat_present, how_many, no_rows
from moebius.lowering.torch_private import custom_operator_name, set_grad_enabled
from moebius.lowering.values import stands_at


@dataclass(frozen=True)
class Operator:
    """A canonical operator.

    parameters: names in order, as in a ``def`` line ("input, dim=0, *dims"); a starred one collects the rest.
    inplace: it writes into its first argument. alias: its result may share storage with an argument. positions: it
    gives positions along its ``dim``, as its result or as the second of two.
    """

    name: str
    parameters: str
    inplace: bool = False
    alias: bool = False
    positions: bool = False

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The arguments by name with defaults filled in, or None where they do not fit."""
        return fill_in(declared(self.parameters), args, kwargs)


@dataclass(frozen=True)
class Call:
    """One use of an operator: ``args`` by parameter name; values are FX arguments."""

    op: Operator
    args: dict[str, Any]
    node: fx.Node

    @property
    def name(self) -> str:
        return self.op.name

    def __getitem__(self, parameter: str) -> Any:
        return self.args[parameter]

    @property
    def either_way(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """The two operands, and the other way round."""
        return (self["input"], self["other"]), (self["other"], self["input"])


@dataclass(frozen=True)
class Declared:
    """A parsed ``parameters``. before: those that come by position or name, with defaults; star: the name that collects
    further positions; after: those that come by name alone."""

    before: dict[str, Any]
    star: str | None
    after: dict[str, Any]


@functools.cache
def declared(parameters: str) -> Declared:
    """The text between the parentheses of a ``def`` line, parsed."""
    found = inspect.signature(eval(f"lambda {parameters}: None", {"torch": torch, "MISSING": MISSING}))
    every = found.parameters.values()
    return Declared(
        {p.name: p.default for p in every if p.kind is p.POSITIONAL_OR_KEYWORD},
        next((p.name for p in every if p.kind is p.VAR_POSITIONAL), None),
        {p.name: p.default for p in every if p.kind is p.KEYWORD_ONLY},
    )


def fill_in(parameters: Declared, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """What ``inspect.Signature.bind`` and ``apply_defaults`` give, at a tenth of the time; None where they raise.

    A tuple or list that is all that a starred parameter collects stands for its items.
    """
    before, star, after = parameters.before, parameters.star, parameters.after
    if len(args) > len(before) and star is None:
        return None
    given = dict(zip(before, args, strict=False))
    for name in kwargs:
        if name in given or not (name in before or name in after):
            return None
    found = {name: given[name] if name in given else kwargs.get(name, default) for name, default in before.items()}
    if star is not None:
        rest = args[len(before) :]
        alone = len(rest) == 1 and isinstance(rest[0], tuple | list)
        found[star] = tuple(rest[0]) if alone else rest
    for name, default in after.items():
        found[name] = kwargs.get(name, default)
    return None if any(value is NO_DEFAULT for value in found.values()) else found


class Missing:
    """Stands for an argument that was not given, where None means something else."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING = Missing()
NO_DEFAULT = inspect.Parameter.empty

FUNCTIONS: dict[Any, Operator] = {}
METHODS: dict[str, Operator] = {}
ATTRIBUTES: dict[str, Operator] = {}
# Operators of other packages, by their names in torch.ops.
CUSTOM = {"transformers::grouped_mm_fallback.default": Operator("grouped_mm", "input, weight, offs")}


def declare(
    name: str,
    parameters: str,
    names: str = "",
    functions: Iterable[Any] = (),
    *,
    alias: bool = False,
    positions: bool = False,
    inplace: Iterable[Any] = (),
) -> None:
    """Put one operator into the tables.

    names: of methods, and of torch's functions where it has one of that name; ``add_`` computes it into the first
    argument. functions, inplace: others (a name: of a method) that compute it, and that do so into the first argument.
    """
    plain = Operator(name, parameters, alias=alias, positions=positions)
    writing = Operator(name, parameters, inplace=True, alias=True)
    for spelling in names.split():
        dunder, found = spelling.startswith("__"), getattr(torch, spelling, None)
        METHODS[spelling] = meant = writing if spelling.endswith("_") and not dunder else plain
        if callable(found) and not dunder:
            FUNCTIONS[found] = meant
    FUNCTIONS.update(dict.fromkeys(functions, plain))
    for spelling in inplace:
        (METHODS if isinstance(spelling, str) else FUNCTIONS)[spelling] = writing


def existing(holder: Any, *names: str) -> list[Any]:
    """Those of the attributes that this torch has."""
    return [getattr(holder, name) for name in names if hasattr(holder, name)]


# Views, shapes and items
declare("getitem", "input, index", "__getitem__", [operator.getitem], alias=True)
declare("permute", "input, *dims", "permute", alias=True)
declare("transpose", "input, dim0, dim1", "transpose swapaxes swapdims", alias=True)
declare("t", "input", "t", alias=True)
declare("reshape", "input, *shape", "reshape view", alias=True)
BITS = Operator("bits", "input, *shape", alias=True)  # view(dtype)
declare("flatten", "input, start_dim=0, end_dim=-1", "flatten", alias=True)
declare("squeeze", "input, dim=None", "squeeze", alias=True)
declare("unsqueeze", "input, dim", "unsqueeze", alias=True)
declare("expand", "input, *size", "expand expand_as", alias=True)  # (its shape is what is asked for)
declare("repeat", "input, *sizes", "repeat")
declare("contiguous", "input", "contiguous", alias=True)
declare("select", "input, dim, index", "select", alias=True)
declare("narrow", "input, dim, start, length", "narrow", alias=True)
declare("chunk", "input, chunks, dim=0", "chunk", alias=True)
declare(
    "split", "input, split_size_or_sections, dim=0", "split",
    existing(functional, "split"), alias=True,
)  # fmt: skip
declare("unbind", "input, dim=0", "unbind", alias=True)
declare("cast", "input, *to, dtype=None, device=None, non_blocking=False, copy=False", "to", alias=True)
for _name, _dtype in (("float", "float32"), ("double", "float64"), ("half", "float16"), ("bfloat16", "bfloat16"),
                      ("int", "int32"), ("long", "int64"), ("bool", "bool")):  # fmt: skip
    declare("cast", f"input, dtype=torch.{_dtype}", _name, alias=True)
declare("cast", "input, dtype, non_blocking=False", "type", alias=True)
declare("type_as", "input, other", "type_as", alias=True)
declare("clone", "input", "clone")
declare("detach", "input", "detach", alias=True)
declare("parameter", "data, requires_grad", functions=[torch.nn.Parameter], alias=True)
declare("size", "input, dim=None", "size")
declare("numel", "input", "numel nelement")
declare("item", "input", "item __int__ __index__", [int])
for _name in ("T", "mT"):
    ATTRIBUTES[_name] = Operator(_name, "input", alias=True)
ATTRIBUTES["shape"] = Operator("size", "input, dim=None")

# New tensors
_options = "dtype=None, device=None, layout=None, requires_grad=False"
for _name in ("zeros", "ones"):
    declare(_name, f"*size, {_options}, pin_memory=False", functions=[getattr(torch, _name)])
    declare(_name, f"input, {_options}, memory_format=None", functions=[getattr(torch, f"{_name}_like")])
    declare(_name, f"input, *size, {_options}, pin_memory=False", f"new_{_name}")
declare("full", f"size, fill_value, {_options}", functions=[torch.full])
declare("full", f"input, fill_value, {_options}, memory_format=None", functions=[torch.full_like])
declare("full", f"input, size, fill_value, {_options}", "new_full")
declare("arange", f"*bounds, {_options}", functions=[torch.arange])

# Selection
declare("one_hot", "input, num_classes=-1", functions=[functional.one_hot])
declare("sum", "input, dim=None, keepdim=False, dtype=None", "sum")
declare("any", "input, dim=None, keepdim=False", "any")
declare("nonzero", "input, *, as_tuple=False", "nonzero")
declare("argwhere", "input", "argwhere")
declare("where", "input, condition, other", "where")  # x.where(condition, other)
declare("where", "condition, input=MISSING, other=MISSING", functions=[torch.where])
declare("unique", "input, sorted=True, return_inverse=False, return_counts=False, dim=None", "unique")
declare(
    "unique", "input, *, sorted=False, return_inverse=False, return_counts=False, dim=None", functions=[in_set_order],
)  # (as torch.unique with sorted=False: in an order of its own)
declare("bincount", "input, weights=None, minlength=0", "bincount")
declare("histc", "input, bins=100, min=0, max=0", "histc")
declare(
    "searchsorted", "sorted_sequence, input, *, out_int32=False, right=False, side=None, sorter=None",
    functions=[torch.searchsorted],
)  # fmt: skip
declare("cumsum", "input, dim, *, dtype=None", "cumsum")
declare("sort", "input, dim=-1, descending=False, stable=False", "sort", positions=True)
declare("argsort", "input, dim=-1, descending=False, stable=False", "argsort", positions=True)
declare("repeat_interleave", "input, repeats, dim=None, *, output_size=None", "repeat_interleave")
declare("tolist", "input", "tolist", [array_numbers])
declare("array_item", "input, *key", functions=[array_item])
declare("rows_if", "input, skipped", functions=[rows_if], alias=True)
declare("of_iterations_that_ran", "input, index, experts=None", functions=[of_iterations_that_ran], alias=True)
declare("is_left", "*asked", functions=[is_left])
declare("experts_that_ran", "*skipped", functions=[experts_that_ran])
declare("how_many", "asked", functions=[how_many])
declare("cat_present", "items, asked", functions=[cat_present])
declare("no_rows", "sizes, dtype, device", functions=[no_rows])
declare("masked_fill", "input, mask, value", "masked_fill masked_fill_")
declare("and", "input, other", "logical_and", [operator.and_])
declare("topk", "input, k, dim=-1, largest=True, sorted=True", "topk", positions=True)
for _name in ("argmax", "argmin", "max", "min"):
    declare(_name, "input, dim=None, keepdim=False", _name, positions=True)
declare("gather", "input, dim, index", "gather")
declare("index_select", "input, dim, index", "index_select")
declare("take_along_dim", "input, indices, dim=None", "take_along_dim")
for _name, _more in (("eq", ""), ("ne", "not_equal"), ("gt", "greater"), ("ge", "greater_equal"), ("lt", "less"),
                     ("le", "less_equal")):  # fmt: skip
    declare(_name, "input, other", f"{_name} {_more} __{_name}__ {_name}_", [getattr(operator, _name)])
declare("not", "input", functions=[operator.not_, torch.sym_not])
declare("logical_not", "input", "logical_not bitwise_not", [operator.invert])

# Row by row
for _name in ("mean", "amax", "amin"):
    declare(_name, "input, dim=None, keepdim=False, *, dtype=None", _name)
declare("var", "input, dim=None, unbiased=None, keepdim=False, *, correction=None", "var")
declare("softmax", "input, dim=None, _stacklevel=3, dtype=None", functions=[functional.softmax, functional.log_softmax])
declare("softmax", "input, dim, dtype=None", "softmax log_softmax")
LAYER_NORMS, RMS_NORMS = [functional.layer_norm, torch.layer_norm], [functional.rms_norm, torch.rms_norm]
declare("layer_norm", "input, normalized_shape, weight=None, bias=None, eps=1e-05", functions=LAYER_NORMS)
declare("rms_norm", "input, normalized_shape, weight=None, eps=None", functions=RMS_NORMS)

# Products
declare("linear", "input, weight, bias=None", functions=[functional.linear])
declare("matmul", "input, other", "matmul mm __matmul__", [operator.matmul])
declare("addmm", "bias, input, other, *, beta=1, alpha=1", "addmm")
declare("addcmul", "input, tensor1, tensor2, *, value=1", "addcmul")
declare("grouped_mm", "input, mat2, offs=None, bias=None, out_dtype=None", functions=existing(torch, "_grouped_mm"))
declare(
    "grouped_mm", "mat_a, mat_b, *, offs=None, bias=None, out_dtype=None", functions=existing(functional, "grouped_mm")
)

# Element by element, two operands
declare("add", "input, other, *, alpha=1", "add __add__ __radd__ add_", [operator.add], inplace=[operator.iadd])
declare("sub", "input, other, *, alpha=1", "sub subtract sub_", [operator.sub], inplace=[operator.isub])
declare("mul", "input, other", "mul multiply __mul__ __rmul__ mul_ multiply_", [operator.mul], inplace=[operator.imul])
declare(
    "div", "input, other, *, rounding_mode=None", "div divide true_divide div_",
    [operator.truediv], inplace=[operator.itruediv],
)  # fmt: skip
declare("pow", "input, exponent", "pow __pow__ pow_", [operator.pow, pow], inplace=[operator.ipow])
declare(
    "floor_divide", "input, other", "floor_divide __floordiv__ floor_divide_",
    [operator.floordiv], inplace=[operator.ifloordiv],
)  # fmt: skip
declare("remainder", "input, other", "remainder __mod__ remainder_", [operator.mod], inplace=[operator.imod])
declare("maximum", "input, other", "maximum")
declare("minimum", "input, other", "minimum")

# Element by element, one operand
for _name in ("sigmoid", "tanh", "exp", "neg", "square", "sqrt", "rsqrt", "abs", "erf", "log", "relu", "sin", "cos",
              "log1p", "expm1"):  # fmt: skip
    declare(_name, "input", f"{_name} {_name}_")
FUNCTIONS[operator.neg] = FUNCTIONS[torch.neg]
FUNCTIONS[functional.sigmoid] = FUNCTIONS[torch.sigmoid]
FUNCTIONS[functional.tanh] = FUNCTIONS[torch.tanh]
for _name in ("silu", "mish", "relu6", "hardswish", "hardsigmoid"):
    declare(_name, "input, inplace=False", functions=[getattr(functional, _name)])
declare("relu", "input, inplace=False", functions=[functional.relu])
declare("gelu", "input, *, approximate='none'", functions=[functional.gelu])
declare("gelu", "input, approximate='none'", functions=[functional.gelu])
declare("softplus", "input, beta=1, threshold=20", functions=[functional.softplus])
declare("leaky_relu", "input, negative_slope=0.01, inplace=False", functions=[functional.leaky_relu])
declare("elu", "input, alpha=1.0, inplace=False", functions=[functional.elu])
declare("selu", "input, inplace=False", functions=[functional.selu])
declare("celu", "input, alpha=1.0, inplace=False", functions=[functional.celu])
declare("hardtanh", "input, min_val=-1.0, max_val=1.0, inplace=False", functions=[functional.hardtanh])
for _name in ("softsign", "tanhshrink", "logsigmoid"):
    declare(_name, "input", functions=[getattr(functional, _name)])
for _name in ("softshrink", "hardshrink"):
    declare(_name, "input, lambd=0.5", functions=existing(functional, _name) + existing(torch, _name))
_functions = existing(functional, "threshold", "_threshold")
declare("threshold", "input, threshold, value, inplace=False", functions=_functions)
declare("glu", "input, dim=-1", functions=[functional.glu])
declare("clamp", "input, min=None, max=None", "clamp clip", inplace=["clamp_", "clip_"])
declare("dropout", "input, p=0.5, training=True, inplace=False", functions=[functional.dropout])

# Accumulation
declare("index_add", "input, dim, index, source, *, alpha=1", "index_add index_add_")
declare("index_put", "input, indices, values, accumulate=False", "index_put index_put_")
declare("index_copy", "input, dim, index, source", "index_copy index_copy_")
declare("stack", "tensors, dim=0", functions=[torch.stack])
declare("cat", "tensors, dim=0", functions=[torch.cat, torch.concat, torch.concatenate])
declare("scatter", "input, dim, index, src", "scatter scatter_")
declare("scatter_add", "input, dim, index, src", "scatter_add scatter_add_")
declare(
    "scatter_add", "input, dim, index, src, reduce, *, include_self=True", "scatter_reduce scatter_reduce_"
)  # with reduce="sum" alone
declare("setitem", "input, index, value", inplace=[operator.setitem])

# Not operators on tensors
declare("set_grad_enabled", "mode", functions=[set_grad_enabled])
declare("skip_iteration", "condition", functions=[skip_iteration])
declare("stack_experts", "index, *parameters", functions=[stack_experts])
declare("join_blocks", "*rows", functions=[join_blocks])
declare("block_experts", "*rows", functions=[block_experts])
declare("block_offsets", "*rows", functions=[block_offsets])
declare("blocks_apart", "joined, *rows", functions=[blocks_apart], alias=True)
declare("pick", "input, index", functions=[pick], alias=True)
declare("sort_slots", "index, experts, axes", functions=[sort_slots])
declare("project", "input, weight, offsets, bias=None, hit=None", functions=[project])
declare("draw_noise", "offsets, *dropouts", functions=[draw_noise])
declare("chosen", "condition, one, other", functions=[chosen])
declare("require_branch", "value, expected, place, *live", functions=[require_branch])
declare("require_equal", "one, other, place, *live", functions=[require_equal])
declare("rows_between", "size, start, end, step", functions=[rows_between])
declare("expert_loop", "body, source, carried=(), captures=()", functions=[expert_loop], alias=True)

ELEMENTWISE = frozenset(
    {"add", "sub", "mul", "div", "pow", "maximum", "minimum", "sigmoid", "tanh", "exp", "neg", "square", "sqrt",
     "rsqrt", "abs", "erf", "log", "relu", "silu", "mish", "relu6", "hardswish", "hardsigmoid", "gelu", "softplus",
     "leaky_relu", "clamp", "sin", "cos", "log1p", "expm1", "elu", "selu", "celu", "hardtanh", "softsign",
     "tanhshrink", "logsigmoid", "softshrink", "hardshrink", "threshold"}
)  # fmt: skip
PRODUCTS = frozenset({"linear", "matmul", "addmm"})  # of rows with a matrix
# Its result depends on nothing but its arguments, and it changes nothing, unless it is spelled in place.
CONTROL = frozenset({"set_grad_enabled", "skip_iteration", "require_branch", "require_equal", "expert_loop", "dropout",
                     "draw_noise"})  # fmt: skip


def read_call(node: Any) -> Call | None:
    """The node as a Call; None where the tables do not know it, or for what is no node."""
    if type(node) is not fx.Node:
        return None
    if MEMO.known is None:
        return read(node)
    known = MEMO.known.calls
    op, target, args, kwargs = node.op, node.target, node.args, node.kwargs
    found = known.get(node)
    # (fx gives a node whose arguments change new tuples and dicts)
    if found is None or not (found[0] is args and found[1] is kwargs and found[2] is target and found[3] == op):
        found = known[node] = (args, kwargs, target, op, read(node))
    return found[4]


def read(node: fx.Node) -> Call | None:
    op: Operator | None = None
    args = node.args
    if node.op == "call_function":
        if node.target is getattr:
            op, args = ATTRIBUTES.get(str(args[1])), args[:1]
        elif node.target is torch.einsum and (product := product_of(*args)) is not None:
            op, args = FUNCTIONS[product], args[1:]
        else:
            op = FUNCTIONS.get(node.target) or CUSTOM.get(custom_operator_name(node.target) or "")
    elif node.op == "call_method":
        op = METHODS.get(str(node.target))
    if op is None:
        return None
    bound = op.bind(tuple(args), node.kwargs)
    if bound is None:
        return None
    if bound.get("reduce", "sum") != "sum" or bound.get("include_self") is False:
        return None
    if op.name == "reshape" and any(isinstance(size, torch.dtype) for size in bound["shape"]):
        op = BITS
    if bound.get("inplace") not in (None, False):
        op = Operator(op.name, op.parameters, inplace=True, alias=True)
    return Call(op, bound, node)


def product_of(text: Any, *operands: Any) -> Callable[..., torch.Tensor] | None:
    """What an einsum of rows and one matrix is, ``torch.einsum("nd,df->nf", rows, w)``."""
    if type(text) is not str or text.count("->") != 1 or text.count(",") != 1 or len(operands) != 2:
        return None
    parts, result = text.replace(" ", "").split("->")
    rows, matrix = parts.split(",")
    letters, inner = rows.replace("...", ""), rows[-1:]
    outer = matrix.replace(inner, "") if inner.isalpha() else ""
    if len(matrix) != 2 or len(outer) != 1 or outer in rows or len(set(letters)) != len(letters):
        return None
    if result != rows[:-1] + outer:
        return None
    return torch.matmul if matrix[0] == inner else torch.nn.functional.linear


def call_name(node: Any) -> str:
    """The one name of what a node calls; empty where the tables do not know it."""
    call = read_call(node)
    return "" if call is None else call.name


def operator_name(target: Any) -> str | None:
    """The operator that calls of this function or method are, where they are read; cheap."""
    op = METHODS.get(target) if isinstance(target, str) else FUNCTIONS.get(target)
    return None if op is None else op.name


def behind(node: Any, passes: Callable[[Call], Any]) -> Any:
    """The tensor that a node is made of by calls that pass, one after another, of their first argument."""
    while (call := read_call(node)) is not None and isinstance(call.args.get("input"), fx.Node) and passes(call):
        node = call["input"]
    return node


def is_pure(node: fx.Node) -> bool:
    """Whether dropping an unused node changes nothing: it is known, writes nowhere and draws no random numbers."""
    if node.op == "get_attr":
        return True
    call = read_call(node)
    if call is None or call.op.inplace:
        return False
    if call.name == "dropout":  # one that is switched off gives its input back (aten/src/ATen/native/Dropout.cpp)
        return not draws(node)
    return call.name not in CONTROL


def draws(node: fx.Node) -> bool:
    """Whether it is a dropout that is switched on."""
    call = read_call(node)
    return call is not None and call.name == "dropout" and call["p"] != 0 and call["training"] is not False


# What goes well for all numbers, of Python's functions; any other one may fail.
NEVER_FAILING = frozenset({
    operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.lt, operator.le, operator.eq,
    operator.ne, operator.gt, operator.ge, operator.and_, operator.or_, operator.xor, operator.not_, abs, max, min,
    bool, torch.sym_not, torch.sym_max, torch.sym_min,
})  # fmt: skip
WRITES = frozenset({operator.setitem, operator.delitem})
NUMBERS = frozenset({torch.sym_not, torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min})


def on_numbers(target: Any) -> bool:
    """Whether a function is Python's arithmetic, where it is given numbers."""
    arithmetic = getattr(target, "__module__", "") in ("_operator", "math") and target not in WRITES
    return arithmetic or target in NUMBERS


def is_size(node: fx.Node) -> bool:
    """Python's arithmetic on sizes and on numbers read before."""
    return node.op == "call_function" and not isinstance(node.meta.get("val"), torch.Tensor) and on_numbers(node.target)


# What a person would call nodes of ours; the others by their names.
OURS = {
    "require_branch": "a branch on data",
    "require_equal": "sizes that have to be equal",
    "skip_iteration": "a `continue` on data",
    "expert_loop": "a loop over experts",
}


def target_name(node: fx.Node) -> str:
    """How a person would call the node's operator."""
    if node.op == "get_attr":
        return "a branch on values, or a loop,"
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    target: Any = node.target
    if getattr(target, "__name__", "") == "expert_loop" and node.args[1] == 1:
        return "a branch on values"
    if target is getattr and len(node.args) > 1:
        return f"attribute {node.args[1]}"
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", str(target))
    if module.partition(".")[0] == "moebius":
        return OURS.get(name, name.replace("_", " "))
    return f"{module}.{name}".removeprefix("_operator.").removeprefix("torch._C._nn.").lstrip(".")


def call_operands(call: Call) -> list[Any]:
    """Outer values of the body's placeholders, in order: the source (for the row), carried, captures."""
    return [call["source"], *call["carried"], *call["captures"]]


def given_to(node: fx.Node) -> dict[fx.Node, Any]:
    """What the graph passes to an expert_loop node, by the placeholders of its body."""
    call = read_call(node)
    assert call is not None
    return dict(zip(loop_body(node).graph.find_nodes(op="placeholder"), call_operands(call), strict=True))


def put_body(gm: fx.GraphModule, word: str, body: fx.GraphModule, loop: fx.Node) -> list[fx.Node]:
    """Have a loop or a branch run a new body. Gives the nodes that may have no reader any more."""
    with gm.graph.inserting_before(loop):
        given = stands_at(gm.graph.get_attr(added_body(gm, word, body)), loop)
    given.meta["val"] = None
    before = [one for one in loop.all_input_nodes if one.op == "get_attr"]
    loop.args = (given, *loop.args[1:])
    return before


def added_body(gm: fx.GraphModule, word: str, body: fx.GraphModule) -> str:
    """The name of a new body of the graph's."""
    name = next(n for n in (f"{word}_{i}" for i in range(len(gm._modules) + 1)) if n not in gm._modules)
    gm.add_module(name, body)
    return name


def loop_body(node: fx.Node) -> fx.GraphModule:
    """The body GraphModule of an expert_loop node."""
    reference = node.args[0] if node.args else node.kwargs["body"]
    assert isinstance(reference, fx.Node) and reference.op == "get_attr", "an expert loop's body is a get_attr node"
    module = node.graph.owning_module
    assert module is not None
    body = module.get_submodule(str(reference.target))
    assert isinstance(body, fx.GraphModule)
    return body
