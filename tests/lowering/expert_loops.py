"""Writes expert loops as capture hands them over, from small Python functions, without capture.

A function under test calls :func:`loop` for its ``for``, :func:`skip` for ``if …: continue`` and :func:`no_grad`. Run
plainly it is the loop; :func:`captured` turns it into a CapturedGraph with fake values and user lines, as capture
would. """

from __future__ import annotations

import contextlib
import inspect
import operator
import sys

import torch
from torch import fx
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from moebius.lowering import CapturedGraph, LoweringOptions, expert_loop, lower, skip_iteration

TRACERS = []


class Tracer(fx.Tracer):
    """Records the user's line with each node, and loops as expert_loop nodes."""

    def __init__(self, file):
        super().__init__()
        self.file = file
        self.bodies = {}

    def create_node(self, *args, **kwargs):
        node = super().create_node(*args, **kwargs)
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        node.meta["where"] = (self.file, frame.f_lineno, frame.f_code.co_name) if frame else ("", 0, "")
        return node


def trace(function, names, file):
    """The graph of a function of the named arguments. Returns (graph, bodies by attribute name)."""
    tracer = Tracer(file)
    tracer.root, tracer.graph = torch.nn.Module(), fx.Graph(tracer_cls=Tracer)
    TRACERS.append(tracer)
    try:
        proxies = [tracer.create_proxy("placeholder", name, (), {}) for name in names]
        result = function(*proxies)
        tracer.create_node("output", "output", (tracer.create_arg(result),), {})
    finally:
        TRACERS.pop()
    return tracer.graph, tracer.bodies


def loop(iteration, source, carried=(), captures=()):
    """``for row in source: carried = iteration(row, *carried, *captures)``."""
    if not TRACERS:
        return expert_loop(iteration, source, carried, captures)
    tracer = TRACERS[-1]
    names = ["row", *(f"carried_{i}" for i in range(len(carried))), *(f"capture_{i}" for i in range(len(captures)))]
    graph, _ = trace(iteration, names, tracer.file)
    name = f"body_{len(tracer.bodies)}"
    tracer.bodies[name] = fx.GraphModule(torch.nn.Module(), graph)
    body = tracer.create_proxy("get_attr", name, (), {})
    result = tracer.create_proxy("call_function", expert_loop, (body, source, tuple(carried), tuple(captures)), {})
    return tuple(result[i] for i in range(len(carried)))


def skip(condition):
    """``if condition: continue``."""
    if isinstance(condition, fx.Proxy):
        condition.tracer.create_proxy("call_function", skip_iteration, (condition,), {})
    else:
        skip_iteration(condition)


def call(function, *args):
    """A call of a Python function that stays one node, as capture leaves functions that it was told about."""
    if TRACERS:
        return TRACERS[-1].create_proxy("call_function", function, args, {})
    return function(*args)


@contextlib.contextmanager
def no_grad():
    """``with torch.no_grad():`` as capture records it (the code around it runs with gradients)."""
    if not TRACERS:
        with torch.no_grad():
            yield
        return
    switch = torch._C._set_grad_enabled
    TRACERS[-1].create_proxy("call_function", switch, (False,), {})
    yield
    TRACERS[-1].create_proxy("call_function", switch, (True,), {})


def is_expert(key):
    return isinstance(key, torch.SymInt) or (isinstance(key, torch.Tensor) and key.dim() == 0)


def run_fake(node, values):
    """One node on fake values. An index held in a tensor selects some row, as in capture."""

    def of(argument):
        return fx.node.map_arg(argument, lambda n: values[n])

    args, kwargs = of(node.args), of(node.kwargs)
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    if node.target is operator.getitem:
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        args = (args[0], tuple(0 if is_expert(key) else key for key in keys) if any(map(is_expert, keys)) else args[1])
    return node.target(*args, **kwargs)


def is_constant(value):
    if isinstance(value, torch.Size):
        return all(map(is_constant, value))
    return isinstance(value, torch.dtype | torch.device | int) and not isinstance(value, torch.SymInt)


def write_constant(node, value):
    for user in list(node.users):
        user.args = fx.node.map_arg(
            user.args,
            lambda n: tuple(value) if isinstance(value, torch.Size) and n is node else value if n is node else n,
        )
        user.kwargs = fx.node.map_arg(user.kwargs, lambda n: value if n is node else n)
    node.graph.erase_node(node)


def fresh_number(values):
    """A number that nothing is known of."""
    fake = next(value for value in values.values() if isinstance(value, torch.Tensor))
    return fake.fake_mode.shape_env.create_unbacked_symint()


def fill_values(graph, bodies, inputs):
    """meta["val"] of every node."""
    values, given = {}, iter(inputs)
    for node in list(graph.nodes):
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            continue
        elif node.op == "get_attr":
            values[node] = None
        elif node.target is expert_loop:
            body, source, carried, captures = fx.node.map_arg(node.args, lambda n: values[n])
            row = fresh_number(values) if isinstance(source, int) else source.new_empty(source.shape[1:])
            body_module = bodies[node.args[0].target]
            fill_values(body_module.graph, {}, [row, *carried, *captures])
            body_module.recompile()
            values[node] = carried
        elif node.target is skip_iteration:
            values[node] = None
        elif node.target is torch._C._set_grad_enabled:
            values[node] = None
        else:
            values[node] = run_fake(node, values)
            if is_constant(values[node]):
                write_constant(node, values[node])  # capture answers these from the fake and leaves no node
                continue
        node.meta["val"] = values[node]


def captured(function, *inputs, dynamic=()):
    """A CapturedGraph of the function for inputs like these. dynamic: positions of symbolic (first) sizes."""
    names = list(inspect.signature(function).parameters)
    graph, bodies = trace(function, names, inspect.getsourcefile(function))
    mode = FakeTensorMode(
        shape_env=ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True, duck_shape=True)
    )
    fakes = []
    for position, value in enumerate(inputs):
        if position in dynamic and isinstance(value, int):
            source = LocalSource(names[position])
            symbol = mode.shape_env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            fakes.append(mode.shape_env.create_symintnode(symbol, hint=value, source=source))
        elif not isinstance(value, torch.Tensor):
            fakes.append(value)
        elif position in dynamic:
            dims = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (value.dim() - 1)
            context = StatelessSymbolicContext(dims, constraint_sizes=[None] * value.dim())
            fakes.append(mode.from_tensor(value, source=LocalSource(names[position]), symbolic_context=context))
        else:
            fakes.append(mode.from_tensor(value, static_shapes=True))
    with mode:
        fill_values(graph, bodies, fakes)
    mode.shape_env.pending_fresh_unbacked_symbols.clear()
    root = torch.nn.Module()
    for name, body in bodies.items():
        setattr(root, name, body)
    output = graph.output_node()
    if not isinstance(output.args[0], tuple):
        output.args = ((output.args[0],),)
    gm = fx.GraphModule(root, graph)
    for placeholder, name in zip(graph.find_nodes(op="placeholder"), names, strict=True):
        placeholder.meta["source"] = f"L[{name!r}]"
    code = function.__code__
    return CapturedGraph(gm, code.co_filename, code.co_firstlineno)


def leaves(inputs):
    """Fresh leaf copies of the inputs; floating-point ones want gradients."""
    fresh = []
    for value in inputs:
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
            value.requires_grad_(value.is_floating_point())
        fresh.append(value)
    return fresh


def outputs_and_gradients(function, inputs):
    """What a function returns, and the gradient of every floating-point input under a fixed cotangent."""
    fresh = leaves(inputs)
    results = function(*fresh)
    results = results if isinstance(results, tuple) else (results,)
    total = 0.0
    for position, result in enumerate(results):
        if isinstance(result, torch.Tensor) and result.requires_grad:
            weights = torch.linspace(0.5, 1.5, result.numel(), dtype=result.dtype).reshape(result.shape)
            total = total + (result * weights).sum() * (position + 1)
    if isinstance(total, torch.Tensor):
        total.backward()
    grads = [f.grad for f in fresh if isinstance(f, torch.Tensor) and f.requires_grad]
    return [r.detach() for r in results if isinstance(r, torch.Tensor)], grads


def same(function, fn, inputs, tolerance=1e-10):
    """Whether outputs and all gradients agree (a missing gradient counts as zero)."""
    expected, expected_grads = outputs_and_gradients(function, inputs)
    actual, actual_grads = outputs_and_gradients(fn, inputs)
    pairs = list(zip(expected, actual, strict=True))
    for a, b in zip(expected_grads, actual_grads, strict=True):
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None else a
        pairs.append((a, torch.zeros_like(a) if b is None else b))
    return all(a.dtype == b.dtype and torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


def lowered(function, inputs, dynamic=(), **options):
    """``lower`` of the function captured at these inputs."""
    wanting = leaves(inputs)
    return lower(captured(function, *wanting, dynamic=dynamic), LoweringOptions(**options))


def make_inputs(tokens=13, width=6, narrow=5, experts=4, top_k=2, seed=0, dtype=torch.float64):
    """(x, logits, gate_up, down): what most loops under test take."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=dtype)

    return (
        normal(tokens, width),
        normal(tokens, experts),
        normal(experts, 2 * narrow, width),
        normal(experts, width, narrow),
    )
