"""Questions about state: a small program around a read and a write of it. One entry each.

``READ(holder)`` stands for the kind's expression, ``WRITE(holder, 7)`` for its statements, ``NEW(5)`` for what makes a
holder. A program has ``prepare()``, which gives what the step is called with; ``step(m, x)``; and, if something outside
changes, ``between(i, m)`` before each call. ``m.holders``: those whose state is compared after each call.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    text: str
    calls: int = 4
    how: str = ""  # "export": the step is loaded from its file; "verify": in shadow mode; "outside": where the
    # state of a backward that the caller runs has changed, the error that says so will do


MODEL = """
class Layer(torch.nn.Module):
    def __init__(self, s, of_inner=True):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3,), 1.5))
        self.s = s
    def forward(self, x):
        return x * self.w * READ(self.s)
class Model(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.holders = [layer.s for layer in layers]
def prepare():
    return Model([Layer(NEW(2)), Layer(NEW(3)), Layer(NEW(5)), Layer(NEW(2))])
"""
ONE = """
class Model(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3,), 1.5))
        self.s = s
        self.holders = [s]
def prepare():
    return Model(NEW(2))
"""


def layers(step: str, calls: int = 4, how: str = "") -> Question:
    return Question(MODEL + step, calls, how)


def one(step: str, calls: int = 4, how: str = "") -> Question:
    return Question(ONE + step, calls, how)


CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint
def part(x, m):
    return torch.sin(x * m.w * READ(m.s)) * 2
def step(m, x):
    y = checkpoint(part, x, m, use_reentrant={})
    {}
    (y * y).sum().backward()
    return y.detach()
"""
FUNCTION = """
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m):
        ctx.m = m
        return x * {}
    @staticmethod
    def backward(ctx, g):
        m = ctx.m
        return g * {}, None
def step(m, x):
    y = F.apply(x * m.w, m)
    {}
    y.sum().backward()
    return y.detach()
"""
WRITE_INSIDE = """
class Layer(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3,), 1.5))
        self.s = s
    def forward(self, x):
        y = x * self.w * READ(self.s)
        WRITE(self.s, 7)
        return y
"""
THROUGH = "    for layer in m.layers:\n        x = layer(x)\n"

QUESTIONS: dict[str, Question] = {
    "straight": one("""
def step(m, x):
    y = x * READ(m.s)
    WRITE(m.s, 7)
    return y * READ(m.s)
"""),
    "read only": one("""
def between(i, m):
    if i % 2: WRITE(m.s, 5)
    else: WRITE(m.s, 3)
def step(m, x):
    return x * m.w * READ(m.s)
""", 5),
    "outside and inside": one("""
def between(i, m):
    if i == 2: WRITE(m.s, 5)
def step(m, x):
    y = x * READ(m.s)
    WRITE(m.s, 3)
    y = y + READ(m.s)
    WRITE(m.s, 2)
    return y
""", 5),
    "written, not read": one("""
def between(i, m):
    if i % 2: WRITE(m.s, 5)
def step(m, x):
    WRITE(m.s, 7)
    return x * m.w
"""),
    "in a helper": one("""
def look(s): return READ(s)
def put(s):
    WRITE(s, 5)
def step(m, x):
    y = x * look(m.s)
    put(m.s)
    return y * look(m.s)
"""),
    "layers": layers("def step(m, x):\n" + THROUGH + "    return x\n"),
    "layers that train": layers("def step(m, x):\n" + THROUGH + "    x.sum().backward()\n    return x.detach()\n"),
    "layers changed outside": layers("""
def between(i, m):
    if i == 1: WRITE(m.layers[2].s, 7)
    if i == 3: WRITE(m.layers[0].s, 5)
def step(m, x):
    for layer in m.layers: x = layer(x)
    return x
""", 5),
    "written before a layer": layers("""
def step(m, x):
    WRITE(m.layers[1].s, 7)
    return m.layers[1](m.layers[0](x))
"""),
    "written between layers": layers("""
def step(m, x):
    x = m.layers[0](x)
    WRITE(m.layers[3].s, 7)
    x = m.layers[3](x)
    return m.layers[0](x)
"""),
    "one layer twice": layers("""
def step(m, x):
    layer = m.layers[0]
    x = layer(x)
    WRITE(layer.s, 5)
    x = layer(x)
    WRITE(layer.s, 2)
    return layer(x)
"""),
    "one state for all layers": layers("""
def prepare():
    s = NEW(2)
    return Model([Layer(s), Layer(s), Layer(s), Layer(s)])
def step(m, x):
    for i, layer in enumerate(m.layers):
        x = layer(x)
        if i == 1:
            WRITE(layer.s, 7)
    return x
"""),
    "layers that write": Question(MODEL + WRITE_INSIDE + "def step(m, x):\n" + THROUGH + "    return x\n"),
    "layers that only write": Question(
        MODEL + WRITE_INSIDE.replace(" * READ(self.s)", "") + "def step(m, x):\n" + THROUGH + "    return x\n"
    ),
    "layers with a hook": layers("""
def hook(module, args, out): return out * READ(module.s)
def prepare():
    m = Model([Layer(NEW(2)), Layer(NEW(3)), Layer(NEW(5)), Layer(NEW(2))])
    for layer in m.layers: layer.register_forward_hook(hook)
    return m
def step(m, x):
    for layer in m.layers: x = layer(x)
    return x
"""),
    "layers, state held outside": layers("""
class Layer(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3,), 1.5))
        self.s = s
    def forward(self, x):
        return x * self.w * self.look()
    def look(self): return READ(self.s)
def step(m, x):
    for layer in m.layers: x = layer(x)
    WRITE(m.layers[0].s, 5)
    for layer in m.layers: x = layer(x)
    return x
"""),
    "cached function": one("""
@functools.lru_cache
def cached(n, m): return READ(m.s)
def prepare():
    cached.cache_clear()
    return Model(NEW(2))
def step(m, x):
    WRITE(m.s, 7)
    return x * cached(1, m)
"""),
    "cached for each layer": layers("""
@functools.lru_cache(maxsize=None)
def cached(layer): return READ(layer.s)
class Layer(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3,), 1.5))
        self.s = s
    def forward(self, x): return x * self.w * cached(self)
def step(m, x):
    for layer in m.layers: x = layer(x)
    return x
"""),
    "cached anew": one("""
@functools.lru_cache
def cached(n, m): return READ(m.s)
def between(i, m): cached.cache_clear()
def step(m, x):
    y = x * cached(1, m)
    WRITE(m.s, 7)
    return y * cached(2, m)
"""),
    "cached, read before": one("""
@functools.lru_cache
def cached(n, m): return READ(m.s)
def step(m, x):
    y = x * cached(1, m)
    WRITE(m.s, 7)
    return y * cached(1, m)
"""),
    "cached, no arguments": one("""
M = None
@functools.lru_cache
def cached(): return READ(M.s)
def prepare():
    global M
    cached.cache_clear()
    M = Model(NEW(2))
    return M
def step(m, x):
    WRITE(m.s, 7)
    return x * cached()
"""),
    "cached method": one("""
class Model(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s = s
        self.holders = [s]
    @functools.lru_cache
    def look(self): return READ(self.s)
def step(m, x):
    WRITE(m.s, 7)
    return x * m.look()
"""),
    "cached, it writes": one("""
@functools.lru_cache
def cached(n, m):
    WRITE(m.s, 7)
    return n
def step(m, x):
    y = x * READ(m.s)
    y = y * cached(2, m)
    return y * READ(m.s)
"""),
    "checkpoint": Question(ONE + CHECKPOINTED.format(False, "WRITE(m.s, 7)")),
    "reentrant checkpoint": Question(ONE + CHECKPOINTED.format(True, "WRITE(m.s, 7)")),
    "checkpoint, left alone": Question(ONE + CHECKPOINTED.format(False, "pass")),
    "checkpoint, changed back": Question(ONE + CHECKPOINTED.format(False, "WRITE(m.s, 7)\n    WRITE(m.s, 2)")),
    "checkpoint that writes": one("""
from torch.utils.checkpoint import checkpoint
def part(x, m):
    y = torch.sin(x * m.w * READ(m.s))
    WRITE(m.s, 7)
    return y
def step(m, x):
    y = checkpoint(part, x, m, use_reentrant=False)
    (y * y).sum().backward()
    return y.detach()
"""),
    "checkpoint, written before": one("""
from torch.utils.checkpoint import checkpoint
def part(x, m): return torch.sin(x * m.w * READ(m.s)) * 2
def step(m, x):
    WRITE(m.s, 7)
    y = checkpoint(part, x, m, use_reentrant=False)
    y.sum().backward()
    WRITE(m.s, 3)
    return y.detach()
"""),
    "checkpointed layers": layers("""
from torch.utils.checkpoint import checkpoint
def part(layer, x): return torch.sin(layer(x)) * 2
def step(m, x):
    for layer in m.layers: x = checkpoint(part, layer, x, use_reentrant=False)
    WRITE(m.layers[1].s, 7)
    x.sum().backward()
    return x.detach()
"""),
    "selective checkpoint": one("""
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
KEEP = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
def part(x, m): return torch.cos(torch.sin(x * m.w) * READ(m.s))
def step(m, x):
    y = checkpoint(part, x, m, use_reentrant=False, context_fn=KEEP)
    WRITE(m.s, 7)
    y.sum().backward()
    return y.detach()
"""),
    "two backwards": one("""
from torch.utils.checkpoint import checkpoint
def part(x, m): return torch.sin(x * m.w * READ(m.s)) * 2
def step(m, x):
    y = checkpoint(part, x, m, use_reentrant=False)
    y.sum().backward()
    WRITE(m.s, 5)
    z = checkpoint(part, x, m, use_reentrant=False)
    z.sum().backward()
    return y.detach() + z.detach()
"""),
    "backward reads": Question(ONE + FUNCTION.format("2", "READ(m.s)", "WRITE(m.s, 7)")),
    "forward reads": Question(ONE + FUNCTION.format("READ(m.s)", "2", "WRITE(m.s, 7)")),
    "both read": Question(ONE + FUNCTION.format("READ(m.s)", "READ(m.s)", "pass")),
    "forward writes": one("""
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m):
        WRITE(m.s, 5)
        return x * 2
    @staticmethod
    def backward(ctx, g): return g * 2, None
def step(m, x):
    y = F.apply(x * m.w, m) * READ(m.s)
    y.sum().backward()
    return y.detach()
"""),
    "backward writes": one("""
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m):
        ctx.m = m
        return x * 2
    @staticmethod
    def backward(ctx, g):
        m = ctx.m
        WRITE(m.s, 5)
        return g * READ(m.s), None
def step(m, x):
    y = F.apply(x * m.w, m)
    y.sum().backward()
    return y.detach() * READ(m.s)
"""),
    "gradient hook reads": one("""
def step(m, x):
    y = (x * m.w).sin()
    y.register_hook(lambda g: g * READ(m.s))
    WRITE(m.s, 7)
    y.sum().backward()
    return y.detach()
"""),
    "gradient hook writes": one("""
def step(m, x):
    y = (x * m.w).sin()
    def hook(g):
        WRITE(m.s, 7)
    y.register_hook(hook)
    y.sum().backward()
    return y.detach() * READ(m.s)
"""),
    "a parameter's hook": one("""
def prepare():
    m = Model(NEW(2))
    m.w.register_hook(lambda g: g * READ(m.s))
    return m
def step(m, x):
    (x * m.w).sum().backward()
    WRITE(m.s, 5)
    (x * m.w).sum().backward()
    return x
"""),
    "break": one("""
def step(m, x):
    y = x * READ(m.s)
    WRITE(m.s, 7)
    torch._dynamo.graph_break()
    y = y * READ(m.s)
    WRITE(m.s, 5)
    return y * READ(m.s)
"""),
    "break deep inside": layers("""
def deep(layer, x):
    y = x * READ(layer.s)
    WRITE(layer.s, 7)
    print(gc.isenabled(), float(y.sum()))
    return y * READ(layer.s)
def step(m, x):
    for layer in m.layers: x = deep(layer, x) * 0.5
    return x
"""),
    "native code reads": one("""
import moebius
@moebius.disable
def native(s): return READ(s)
def step(m, x):
    WRITE(m.s, 7)
    y = x * native(m.s)
    WRITE(m.s, 3)
    return y * READ(m.s) * native(m.s)
"""),
    "native code writes": one("""
import moebius
@moebius.disable
def native(s):
    WRITE(s, 5)
def step(m, x):
    y = x * READ(m.s)
    native(m.s)
    y = y * READ(m.s)
    WRITE(m.s, 3)
    return y
"""),
    "side exit": one("""
def step(m, x):
    y = x * READ(m.s)
    if y.sum() > 12 * x[0]:
        WRITE(m.s, 7)
        y = y * 2
    else:
        WRITE(m.s, 5)
    return y * READ(m.s)
def arguments(i): return torch.tensor([1.0, 2.0, 3.0]) * (-1) ** i
"""),
    "written before a side exit": one("""
def step(m, x):
    WRITE(m.s, 3)
    if x.sum() > 0:
        return x * READ(m.s)
    WRITE(m.s, 5)
    return x + READ(m.s)
def arguments(i): return torch.tensor([1.0, 2.0, 3.0]) * (-1) ** i
"""),
    "branch over rows": one("""
def step(m, x):
    y = torch.zeros_like(x)
    for e in range(2):
        row = torch.where(x > e + 1)[0]
        if row.numel() == 0: continue
        y.index_add_(0, row, x[row] * READ(m.s))
    WRITE(m.s, 7)
    for e in range(2):
        row = torch.where(x > e)[0]
        if len(row):
            y[row] += x[row] * READ(m.s)
    return y
"""),
    "experts that write": one("""
def step(m, x):
    y = torch.zeros_like(x)
    for e in range(3):
        row = torch.where(x.long() == e)[0]
        if row.numel() == 0: continue
        WRITE(m.s, 5)
        y.index_add_(0, row, x[row] * READ(m.s))
    return y
"""),
    "experts as layers": layers("""
def step(m, x):
    y = torch.zeros_like(x)
    for e, layer in enumerate(m.layers):
        row = torch.where(x.long() == e)[0]
        if row.numel() == 0: continue
        y.index_add_(0, row, x[row] * layer.w[0] * READ(layer.s))
    return y
"""),
    "failure with a handler": one("""
def step(m, x):
    y = x * READ(m.s)
    try:
        WRITE(m.s, 7)
        y = y @ torch.ones(2)
        WRITE(m.s, 5)
    except RuntimeError:
        y = y * READ(m.s)
    return y
"""),
    "failure on data": one("""
def step(m, x):
    y = x * READ(m.s)
    WRITE(m.s, 7)
    y = y + torch.ones(3)[x.long()]
    WRITE(m.s, 5)
    return y * READ(m.s)
def arguments(i): return torch.tensor([0.0, 1.0, 2.0]) if i != 2 else torch.tensor([0.0, 1.0, 9.0])
"""),
    "failure on data, handled": one("""
def step(m, x):
    y = x * READ(m.s)
    t = m.s
    try:
        WRITE(t, 7)
        y = y + torch.ones(3)[x.long()]
        WRITE(t, 5)
    except IndexError:
        y = y - READ(m.s)
    return y * READ(m.s)
def arguments(i): return torch.tensor([0.0, 1.0, 2.0]) if i != 2 else torch.tensor([0.0, 1.0, 9.0])
"""),
    "raised": one("""
def step(m, x):
    y = x * READ(m.s)
    WRITE(m.s, 7)
    raise ValueError("no")
"""),
    "raised and handled": one("""
def inner(m):
    WRITE(m.s, 7)
    raise ValueError("no")
def step(m, x):
    try: inner(m)
    except ValueError as e: x = x + len(str(e))
    return x * READ(m.s)
"""),
    "finally": one("""
def step(m, x):
    try:
        WRITE(m.s, 7)
        return x * READ(m.s)
    finally:
        WRITE(m.s, 3)
"""),
    "with": one("""
@contextlib.contextmanager
def put(m):
    WRITE(m.s, 7)
    try: yield READ(m.s)
    finally:
        WRITE(m.s, 3)
def step(m, x):
    with put(m) as v:
        y = x * v * READ(m.s)
    return y * READ(m.s)
"""),
    "generator around": one("""
def each(m):
    yield READ(m.s)
    WRITE(m.s, 7)
    yield READ(m.s)
    WRITE(m.s, 5)
def step(m, x):
    y = x
    for v in each(m): y = y * v * READ(m.s)
    return y * READ(m.s)
"""),
    "generator left": one("""
def each(m):
    yield READ(m.s)
    WRITE(m.s, 7)
    yield READ(m.s)
def step(m, x):
    g = each(m)
    y = x * next(g)
    WRITE(m.s, 3)
    return y * next(g)
"""),
    "comprehension": one("""
def put(m, x):
    WRITE(m.s, 7)
    return x
def step(m, x):
    parts = [put(m, x) * READ(m.s) if i else x * READ(m.s) for i in range(3)]
    return sum(parts)
"""),
    "sort key": one("""
def step(m, x):
    def key(i):
        v = READ(m.s) if i else 0
        WRITE(m.s, 5)
        return -i
    order = sorted([0, 1, 2], key=key)
    return x * order[0] * READ(m.s)
"""),
    "map": one("""
def step(m, x):
    def of(i):
        v = READ(m.s)
        WRITE(m.s, 7)
        return v * i
    y = x
    for v in map(of, [1, 2]): y = y + v
    return y
"""),
    "min key": one("""
def step(m, x):
    def of(i): return abs(i - 2)
    WRITE(m.s, 3)
    k = min([1, 2, 3], key=lambda i: (of(i), 0 * i))
    return x * k * READ(m.s)
"""),
    "any": one("""
def step(m, x):
    def of(i):
        WRITE(m.s, 7)
        return i > 0
    y = x * READ(m.s)
    if any(of(i) for i in range(3)): y = y + READ(m.s)
    return y
"""),
    "special method": one("""
class Add:
    def __init__(self, m): self.m = m
    def __add__(self, other):
        WRITE(self.m.s, 7)
        return other * READ(self.m.s)
def step(m, x):
    y = Add(m) + x
    return y * READ(m.s)
"""),
    "nested capture": one("""
import moebius
def look(m, x):
    y = x * READ(m.s)
    WRITE(m.s, 7)
    return y
inner = moebius.capture(look) if CAPTURED else look
def step(m, x):
    y = inner(m, x)
    y = y * READ(m.s)
    WRITE(m.s, 3)
    return inner(m, y)
"""),
    "replaced object": one("""
def between(i, m):
    if i == 2:
        m.s = NEW(5)
        m.holders.append(m.s)
def step(m, x): return x * READ(m.s)
"""),
    "replaced in the step": one("""
def step(m, x):
    y = x * READ(m.s)
    m.s = NEW(5)
    y = y * READ(m.s)
    WRITE(m.s, 3)
    m.holders = [m.s]
    return y * READ(m.s)
"""),
    "made in the step": one("""
def step(m, x):
    s = NEW(3)
    y = x * READ(s)
    WRITE(s, 5)
    return y * READ(s)
"""),
    "alias": one("""
def prepare():
    m = Model(NEW(2))
    m.t = m.s
    return m
def step(m, x):
    t = m.t
    y = x * READ(m.s)
    WRITE(t, 7)
    y = y * READ(m.s)
    s = m.s
    WRITE(s, 5)
    return y * READ(t)
"""),
    "alias that parts": one("""
def prepare():
    m = Model(NEW(2))
    m.t = m.s
    return m
def between(i, m):
    if i == 2:
        m.t = NEW(3)
        m.holders.append(m.t)
def step(m, x):
    WRITE(m.t, 7)
    return x * READ(m.s)
"""),
    "alternating models": one("""
def prepare():
    m = Model(NEW(2))
    m.other = Model(NEW(3))
    m.holders = [m.s, m.other.s]
    return m
def step(m, x):
    y = x * READ(m.s)
    WRITE(m.s, 7)
    m.s, m.other.s = m.other.s, m.s
    return y * READ(m.s)
"""),
    "of an object that the step made": one("""
from torch.utils.checkpoint import checkpoint
class Held: pass
def part(x, m, h): return torch.sin(x * m.w * READ(h.s) * h.by) * 2
def step(m, x):
    h = Held()
    h.s = m.s
    h.by = 2
    y = checkpoint(part, x, m, h, use_reentrant=False)
    h.by = 3
    h.s = NEW(5)
    y.sum().backward()
    return y.detach()
"""),
    "in a list of the step": one("""
def step(m, x):
    held = [m.s]
    y = x * READ(held[0])
    WRITE(held[0], 7)
    return y * READ(m.s)
"""),
    "optimizer step": one("""
def prepare():
    m = Model(NEW(2))
    m.opt = [torch.optim.SGD([m.w], lr=0.1)]
    return m
def step(m, x):
    (x * m.w * READ(m.s)).sum().backward()
    WRITE(m.s, 3)
    m.opt[0].step()
    m.opt[0].zero_grad()
    return (x * m.w * READ(m.s)).detach()
"""),
    "loop that counts": one("""
def step(m, x):
    for i in range(3):
        x = x * READ(m.s) * 0.5
        if i == 0: WRITE(m.s, 5)
        elif i == 1: WRITE(m.s, 3)
    return x
"""),
    "printed": one("""
def step(m, x):
    print("before", READ(m.s))
    WRITE(m.s, 7)
    print("after", READ(m.s))
    return x * m.w
"""),
    "returned": one("""
def step(m, x):
    WRITE(m.s, 3)
    return x, READ(m.s)
"""),
    "ten calls": one("""
def between(i, m):
    if i in (3, 6, 7): WRITE(m.s, 5)
    if i == 8: WRITE(m.s, 2)
def step(m, x):
    y = x * READ(m.s)
    if i_odd(m): WRITE(m.s, 3)
    return y
def i_odd(m):
    m.count = getattr(m, "count", 0) + 1
    return m.count % 3 == 0
""", 10),
    "export": one("""
def step(m, x):
    y = x * m.w * READ(m.s)
    WRITE(m.s, 7)
    return y * READ(m.s)
""", 4, "export"),
    "shadow mode": one("""
def step(m, x):
    y = x * m.w * READ(m.s)
    WRITE(m.s, 7)
    return (y * READ(m.s)).detach()
""", 4, "verify"),
}
