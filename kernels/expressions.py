"""Element-wise gates as text: ``"clamp(g, None, 7) * sigmoid(1.702 * clamp(g, None, 7)) * (clamp(u, -7, 7) + 1)"``.

g is the gate half of a pre-activation (all of it where there is no gate; ``h`` says the same), u the up half. A text is
read into a small expression graph in which equal parts are one node, differentiated symbolically, and evaluated with
torch here; the Triton form writes it out as Triton source.

Operators + - * /, numbers, and the functions of FUNCTIONS; ``where(g > 0, a, b)`` with one of > >= < <=. Derivatives at
kinks are torch's: clamp passes the gradient on its bounds, hardtanh does not, relu has 0 at 0.
"""
from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moebius.kernels.errors import ExpertsInputError


@dataclass(frozen=True, eq=False, repr=False)
class Expr:
    """One node; equal nodes are one object (``node`` makes them). op: "g", "u", "const" (``number``), an arithmetic
    operator, or a function. bounds: of clamp and inside."""

    op: str
    arguments: tuple[Expr, ...] = ()
    number: float = 0.0
    bounds: tuple[float | None, float | None] = (None, None)


MADE: dict[tuple, Expr] = {}


def node(op: str, *arguments: Expr, number: float = 0.0, bounds: tuple[float | None, float | None] = (None, None)
         ) -> Expr:
    """The one node of this meaning."""
    key = (op, arguments, repr(number), bounds)  # repr: 0.0 and -0.0 differ
    return MADE.setdefault(key, Expr(op, arguments, number, bounds))


def const(number: float) -> Expr:
    return node("const", number=float(number))


GATE, UP, ZERO, ONE = node("g"), node("u"), const(0), const(1)


def add(a: Expr, b: Expr) -> Expr:
    if a == ZERO or b == ZERO:
        return b if a == ZERO else a
    return const(a.number + b.number) if a.op == b.op == "const" else node("add", a, b)


def sub(a: Expr, b: Expr) -> Expr:
    return a if b == ZERO else node("sub", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    if ZERO in (a, b):  # of derivatives only: a product that the text has with a literal 0 is kept (0 * inf)
        return ZERO
    if a == ONE or b == ONE:
        return b if a == ONE else a
    return const(a.number * b.number) if a.op == b.op == "const" else node("mul", a, b)


def call(function: str, x: Expr) -> Expr:
    return node(function, x)


def scaled(factor: float, x: Expr) -> Expr:
    return mul(const(factor), x)


def silu(x: Expr) -> Expr:
    return mul(x, call("sigmoid", x))


def gelu(x: Expr) -> Expr:
    return mul(scaled(0.5, x), add(ONE, call("erf", scaled(math.sqrt(0.5), x))))


def gelu_tanh(x: Expr) -> Expr:
    inner = scaled(math.sqrt(2 / math.pi), add(x, scaled(0.044715, mul(x, call("square", x)))))
    return mul(scaled(0.5, x), add(ONE, call("tanh", inner)))


# Functions of one argument that are nodes, and their derivative from the node itself.
PRIMITIVES: dict[str, Callable[[Expr], Expr]] = {
    "sigmoid": lambda y: mul(y, sub(ONE, y)),
    "tanh": lambda y: sub(ONE, call("square", y)),
    "exp": lambda y: y,
    "erf": lambda y: scaled(2 / math.sqrt(math.pi), call("exp", call("neg", call("square", y.arguments[0])))),
    "relu": lambda y: call("positive", y.arguments[0]),
    "square": lambda y: scaled(2, y.arguments[0]),
    "neg": lambda y: const(-1),
    "abs": lambda y: call("sign", y.arguments[0]),
    "sqrt": lambda y: node("div", const(0.5), y),
    "rsqrt": lambda y: scaled(-0.5, mul(y, call("square", y))),
    "log": lambda y: node("div", ONE, y.arguments[0]),
    "log1p": lambda y: node("div", ONE, add(ONE, y.arguments[0])),
    "expm1": lambda y: add(y, ONE),
    "sin": lambda y: call("cos", y.arguments[0]),
    "cos": lambda y: call("neg", call("sin", y.arguments[0])),
    "clamp": lambda y: node("inside", *y.arguments, bounds=y.bounds),
    "hardtanh": lambda y: node("within", *y.arguments, bounds=y.bounds),
}
# Functions that are written out.
MACROS: dict[str, Callable[[Expr], Expr]] = {
    "silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu2": lambda x: call("square", call("relu", x)),
    "identity": lambda x: x,
}
BOUNDED = ("clamp", "hardtanh")
FUNCTIONS = ("clamp", *(name for name in PRIMITIVES if name not in ("neg", "clamp")), *MACROS, "where")
BINARY: dict[type, str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
COMPARISONS: dict[type, str] = {ast.Gt: "gt", ast.GtE: "ge", ast.Lt: "lt", ast.LtE: "le"}
LONGEST = 1500  # characters of a text
DEEPEST = 100  # levels of a text's syntax tree: what is read and differentiated by recursion


def depth(tree: ast.AST) -> int:
    """Levels of a syntax tree, without recursion."""
    levels, row = 0, [tree]
    while row:
        levels, row = levels + 1, [child for each in row for child in ast.iter_child_nodes(each)]
    return levels


@cache
def parse(text: str) -> Expr:
    """The expression that a text says, or ExpertsInputError with the part that cannot be read."""

    def fail(what: str) -> ExpertsInputError:
        return ExpertsInputError(
            f"activation={text!r}: {what}. It is a name of ACTIVATIONS, or an expression of g and u with + - * /, "
            f"numbers and {', '.join(FUNCTIONS)}; clamp(x, low, high) takes None for no bound")

    def number_of(part: ast.AST) -> float | None:
        """The value of a literal, with its sign; None for the word None."""
        if isinstance(part, ast.Constant) and part.value is None:
            return None
        sign = 1.0
        while isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.USub | ast.UAdd):
            sign, part = (-sign if isinstance(part.op, ast.USub) else sign), part.operand
        if not isinstance(part, ast.Constant) or isinstance(part.value, bool) or not isinstance(
                part.value, int | float):
            raise fail(f"{ast.unparse(part)!r} is not a number or None")
        return sign * part.value

    def read(part: ast.AST) -> Expr:
        match part:
            case ast.Name(id="g" | "h"):
                return GATE
            case ast.Name(id="u"):
                return UP
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                if not math.isfinite(number):
                    raise fail(f"{ast.unparse(part)!r} is not finite")
                return const(number)
            case ast.UnaryOp(op=ast.UAdd()):
                return read(part.operand)
            case ast.UnaryOp(op=ast.USub()):
                inner = read(part.operand)
                return const(-inner.number) if inner.op == "const" else call("neg", inner)
            case ast.BinOp() if type(part.op) in BINARY:
                left, right = read(part.left), read(part.right)
                return node(BINARY[type(part.op)], left, right)
            case ast.Call(func=ast.Name(id=name), args=[x, low, high], keywords=[]) if name in BOUNDED:
                return node(name, read(x), bounds=(number_of(low), number_of(high)))
            case ast.Call(func=ast.Name(id="where"), args=[
                    ast.Compare(left=left, ops=[compare], comparators=[right]), a, b], keywords=[]):
                if type(compare) in COMPARISONS:
                    return node("where", node(COMPARISONS[type(compare)], read(left), read(right)), read(a), read(b))
            case ast.Call(func=ast.Name(id=name), args=[x], keywords=[]) if (
                    name in FUNCTIONS and name not in (*BOUNDED, "where")):
                return MACROS[name](read(x)) if name in MACROS else call(name, read(x))
        raise fail(f"{ast.unparse(part)!r} cannot be read")

    if len(text) > LONGEST:
        raise ExpertsInputError(f"activation has {len(text)} characters; at most {LONGEST} are read")
    try:
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, MemoryError) as error:
            raise fail(f"{error.args[0] if error.args else 'syntax error'}") from None
        if depth(tree) > DEEPEST:
            raise fail("it is nested too deeply")
        root = read(tree.body)
        in_order([differentiate(root, GATE), differentiate(root, UP)])  # what else recurses, here where it is caught
        return root
    except RecursionError:
        raise fail("it is nested too deeply") from None
    except OverflowError:
        raise fail("a number is too large") from None


def in_order(roots: Iterable[Expr]) -> list[Expr]:
    """Every node that the roots need, once, arguments first."""
    found: dict[Expr, None] = {}

    def visit(each: Expr) -> None:
        if each not in found:
            for argument in each.arguments:
                visit(argument)
            found[each] = None

    for root in roots:
        visit(root)
    return list(found)


def partials(of: Expr) -> tuple[Expr, ...]:
    """d of / d argument, for each argument."""
    match of.op:
        case "add":
            return ONE, ONE
        case "sub":
            return ONE, const(-1)
        case "mul":
            return of.arguments[1], of.arguments[0]
        case "div":
            inverse = node("div", ONE, of.arguments[1])
            return inverse, call("neg", mul(of, inverse))
        case "where":
            return ZERO, node("where", of.arguments[0], ONE, ZERO), node("where", of.arguments[0], ZERO, ONE)
        case "gt" | "ge" | "lt" | "le":
            return ZERO, ZERO
        case _:
            return (PRIMITIVES[of.op](of),)


def differentiate(root: Expr, leaf: Expr) -> Expr:
    """d root / d leaf, in reverse over the graph, so that shared parts are differentiated once."""
    order = in_order([root])
    if leaf not in order:
        return ZERO
    depends = {leaf}
    for each in order:
        if any(argument in depends for argument in each.arguments):
            depends.add(each)
    adjoint: dict[Expr, Expr] = {root: ONE}
    for each in reversed(order):
        if each not in depends or each not in adjoint or not each.arguments:
            continue
        for argument, slope in zip(each.arguments, partials(each), strict=True):
            if argument in depends:
                adjoint[argument] = add(adjoint.get(argument, ZERO), mul(adjoint[each], slope))
    return adjoint.get(leaf, ZERO)


@dataclass(frozen=True)
class Gating:
    """a = value(g, u), and its derivatives. d_up is None where there is no up half."""

    value: Expr
    d_gate: Expr
    d_up: Expr | None


@cache
def gating(text: str, gated: bool) -> Gating:
    """The gate that an expression says. Raises ExpertsInputError where its letters do not go with ``gated``."""
    value = parse(text)
    letters = set(in_order([value]))
    if GATE not in letters:
        raise ExpertsInputError(f"activation={text!r} does not use g")
    if gated and UP not in letters:
        raise ExpertsInputError(f"activation={text!r} does not use u; an expert without an up half is gate='none'")
    if not gated and UP in letters:
        raise ExpertsInputError(f"activation={text!r} uses u, and with gate='none' there is no up half")
    return Gating(value, differentiate(value, GATE), differentiate(value, UP) if gated else None)


def evaluate(roots: list[Expr], gate: Tensor, up: Tensor | None) -> list[Tensor]:
    """The values of expressions, element by element, in gate's dtype."""
    held: dict[Expr, Tensor | float] = {GATE: gate}
    if up is not None:
        held[UP] = up
    for each in in_order(roots):
        if each.op == "const":
            held[each] = each.number
        elif each.arguments:
            held[each] = apply(each, [held[argument] for argument in each.arguments], gate)
    results = (held[root] for root in roots)
    return [r.clone() if r is gate or r is up else r if isinstance(r, Tensor) else torch.full_like(gate, r)
            for r in results]


def apply(of: Expr, values: list[Tensor | float], like: Tensor) -> Tensor | float:
    """One node. Numbers stay numbers as long as they meet no tensor."""
    x = values[0]
    match of.op:
        case "add":
            return x + values[1]
        case "sub":
            return x - values[1]
        case "mul":
            return x * values[1]
        case "div":
            return x / values[1]
        case "neg":
            return -x
        case "gt" | "ge" | "lt" | "le":
            return getattr(operator, of.op)(x, values[1])
        case "where":
            return chosen(values, like)
    tensor = x if isinstance(x, Tensor) else torch.full_like(like, x)
    low, high = of.bounds
    match of.op:
        case "clamp" | "hardtanh":
            return tensor if low is None and high is None else tensor.clamp(low, high)
        case "inside":  # bounds inclusive, as torch differentiates clamp; NaN is outside
            ok = tensor == tensor
            if low is not None:
                ok &= tensor >= low
            if high is not None:
                ok &= tensor <= high
            return ok.to(tensor.dtype)
        case "within":  # bounds exclusive, as torch differentiates hardtanh and relu6
            ok = torch.ones_like(tensor, dtype=torch.bool)
            if low is not None:
                ok &= ~(tensor <= low)
            if high is not None:
                ok &= ~(tensor >= high)
            return ok.to(tensor.dtype)
        case "positive":
            return (~(tensor <= 0)).to(tensor.dtype)
        case _:
            return getattr(torch, of.op)(tensor)


def chosen(values: list[Tensor | float], like: Tensor) -> Tensor | float:
    """where(condition, a, b)."""
    condition, a, b = values
    if not isinstance(condition, Tensor):
        return a if condition else b
    first, second = (v if isinstance(v, Tensor) else torch.full_like(like, v) for v in (a, b))
    return torch.where(condition, first, second)
