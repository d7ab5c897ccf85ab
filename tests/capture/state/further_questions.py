"""Further questions about state (see ``questions``): who calls whom, what is left half way, what is kept."""

from __future__ import annotations

from .questions import THROUGH, Question, layers, one

BACKWARD = "    y.sum().backward()\n    return y.detach()\n"

# Who calls the function that reads or writes.
CALLERS = {
    "reduce": "functools.reduce(lambda a, i: a + touch(m, i), [0, 1, 2], 0)",
    "filter": "len(list(filter(lambda i: touch(m, i) > 0, [0, 1, 2])))",
    "max key": "max([1, 2, 3], key=lambda i: (touch(m, i), i)[1])",
    "sum of a generator": "sum(touch(m, i) for i in range(3))",
    "dict comprehension": "sum({i: touch(m, i) for i in range(3)}.values())",
    "starred": "sum([*(touch(m, i) for i in range(2)), 1])",
    "re.sub": "len(re.sub('a', lambda found: 'b' * int(touch(m, 1)), 'aba'))",
    "default factory that touches": "collections.defaultdict(lambda: touch(m, 1))['k']",
    "dict.setdefault": "{}.setdefault('k', touch(m, 1))",
    "partial": "functools.partial(touch, m)(1)",
    "starmap": "sum(itertools.starmap(touch, [(m, 1), (m, 2)]))",
    "takewhile": "sum(itertools.takewhile(lambda v: v < 100, map(lambda i: touch(m, i), [1, 2])))",
    "iter with a sentinel": "sum(itertools.islice(iter(lambda: touch(m, 1), None), 2))",
    "lambda in a dict": "{'a': lambda: touch(m, 1)}['a']()",
    "recursion": "deeper_by(m, 3)",
    "walrus": "(v := touch(m, 1)) + v",
    "chained comparison": "(0 < touch(m, 1) < 100) + touch(m, 2)",
    "condition": "touch(m, 1) if touch(m, 0) > 0 else 0",
    "and, or": "(touch(m, 0) and touch(m, 1)) or touch(m, 2)",
    "keyword arguments": "less(b=touch(m, 1), a=touch(m, 2))",
    "subscript": "[5, 6, 7, 8, 9, 10, 11, 12][int(touch(m, 1)) % 8]",
    "f-string": "len(f'{float(touch(m, 1)):.1f}{float(touch(m, 2))!r}')",
    "singledispatch": "dispatched(1, m)",
    "coroutine": "driving(m)",
    "yield from": "sum(from_inner(m))",
    "generator closed": "closing(m)",
    "generator thrown into": "throwing(m)",
    "ExitStack": "on_a_stack(m)",
}
HELPERS = """
import re
def touch(m, i):
    v = READ(m.s)
    WRITE(m.s, 7)
    return v * i
def deeper_by(m, n): return touch(m, 1) if n == 0 else touch(m, n) + deeper_by(m, n - 1)
def less(a, b): return a - b
@functools.singledispatch
def dispatched(v, m): return 1
@dispatched.register
def _(v: int, m): return touch(m, v)
async def awaiting(m):
    await waiting(m)
    return touch(m, 2)
@types.coroutine
def waiting(m):
    yield touch(m, 1)
def driving(m):
    c = awaiting(m)
    v = c.send(None)
    try: c.send(None)
    except StopIteration as e: v = v + e.value
    return v
def touching(m):
    try:
        yield READ(m.s)
        yield touch(m, 1)
    finally:
        WRITE(m.s, 5)
def from_inner(m):
    yield from touching(m)
    yield READ(m.s)
def closing(m):
    g = touching(m)
    v = next(g)
    g.close()
    return v + READ(m.s)
def catching(m):
    try:
        yield READ(m.s)
    except ValueError:
        WRITE(m.s, 5)
        yield READ(m.s)
def throwing(m):
    g = catching(m)
    return next(g) + g.throw(ValueError("no"))
def on_a_stack(m):
    with contextlib.ExitStack() as stack:
        stack.callback(touch, m, 1)
        v = READ(m.s)
    return v + READ(m.s)
"""
SPECIAL = {
    "__lt__ in sort": ("def __lt__(self, other): return touch(self.m, 1) < 0", "len(sorted([A(m), A(m)]))"),
    "__eq__ in a list": ("def __eq__(self, other): return touch(self.m, 1) < 0", "(3 in [A(m), A(m)]) + 1"),
    "__hash__ in a dict": ("def __hash__(self): return int(touch(self.m, 1))", "len({A(m): 1})"),
    "__iter__ in tuple": ("def __iter__(self): yield touch(self.m, 1)", "tuple(A(m))[0]"),
    "__index__ in range": ("def __index__(self): return int(touch(self.m, 1))", "len(range(A(m)))"),
    "__bool__ in not": ("def __bool__(self): return touch(self.m, 1) > 2", "(2 if not A(m) else 3)"),
    "__len__ in len": ("def __len__(self): return int(touch(self.m, 1))", "len(A(m))"),
    "__float__": ("def __float__(self): return float(touch(self.m, 1))", "float(A(m))"),
    "__format__": ("def __format__(self, spec): return str(float(touch(self.m, 1)))", "len(f'{A(m)}')"),
    "__repr__ in a list": ("def __repr__(self): return str(float(touch(self.m, 1)))", "len(repr([A(m)]))"),
    "__call__": ("def __call__(self, i): return touch(self.m, i)", "A(m)(2)"),
    "__getattr__ that touches": ("def __getattr__(self, name): return touch(self.m, 1)", "A(m).other"),
    "property that touches": ("@property\n    def p(self): return touch(self.m, 1)", "A(m).p"),
    "cached_property": ("@functools.cached_property\n    def p(self): return touch(self.m, 1)", "A(m).p"),
    "__enter__": (
        "def __enter__(self): return touch(self.m, 1)\n    def __exit__(self, *e): touch(self.m, 1)",
        "entered(A(m))",
    ),
    "__set_name__": (
        "def __set_name__(self, owner, name): touch(self.m, 1)",
        "(type('B', (), {'a': A(m)}), READ(m.s))[1]",
    ),
    "__del__": ("def __del__(self): touch(self.m, 1)", "dropped(A, m)"),
}


def called(expression: str, before: str = "") -> Question:
    return one(HELPERS + before + f"""
def step(m, x):
    y = x * READ(m.s)
    y = y + ({expression})
    return y * READ(m.s)
""")


def special(method: str, expression: str) -> Question:
    return called(expression, f"""
class A:
    def __init__(self, m): self.m = m
    {method}
def entered(a):
    with a as v: return v
def dropped(cls, m):
    a = cls(m)
    del a
    return READ(m.s)
""")


QUESTIONS: dict[str, Question] = {
    **{name: called(expression) for name, expression in CALLERS.items()},
    **{name: special(*entry) for name, entry in SPECIAL.items()},
    "toggled": one("""
def step(m, x):
    v = READ(m.s)
    if v == 2:
        WRITE(m.s, 3)
    else:
        WRITE(m.s, 2)
    return x * v + READ(m.s)
""", 6),
    "looked up": one("""
def between(i, m):
    if i % 2: WRITE(m.s, 5)
def step(m, x): return x * {2: 4, 3: 8, 5: 16}.get(float(READ(m.s)), 1)
"""),
    "as often": one("""
def between(i, m):
    if i % 2: WRITE(m.s, 3)
def step(m, x):
    for _ in range(int(READ(m.s))): x = x * 0.5
    return x
"""),
    "another value in each call": one("""
def between(i, m):
    if i % 4 == 0: WRITE(m.s, 2)
    elif i % 4 == 1: WRITE(m.s, 3)
    elif i % 4 == 2: WRITE(m.s, 5)
    else: WRITE(m.s, 7)
def step(m, x):
    y = x * m.w * READ(m.s)
    y.sum().backward()
    return y.detach()
""", 9),
    "match": one("""
def step(m, x):
    match float(READ(m.s)):
        case 2.0: WRITE(m.s, 3)
        case 3.0: WRITE(m.s, 5)
        case other: x = x + other
    return x * READ(m.s)
"""),
    "a captured function writes between": one("""
import moebius
def other(m, x):
    WRITE(m.s, 5)
    return x * READ(m.s)
other = moebius.capture(other) if CAPTURED else other
def between(i, m):
    if i % 2: other(m, torch.ones(3))
def step(m, x):
    y = x * READ(m.s)
    WRITE(m.s, 3)
    return y
"""),
    "raises in one call": one("""
def step(m, x):
    y = x * READ(m.s)
    WRITE(m.s, 7)
    m.count = getattr(m, "count", 0) + 1
    if m.count == 2: raise ValueError("no")
    WRITE(m.s, 3)
    return y * READ(m.s)
"""),
    "closure made before": one("""
def step(m, x):
    s = m.s
    def late(): return READ(s)
    early = READ(m.s)
    WRITE(m.s, 7)
    return x * late() + early
"""),
    "called at the end": one("""
def step(m, x):
    todo = []
    todo.append(lambda: READ(m.s))
    def put():
        WRITE(m.s, 5)
    todo.append(put)
    todo.append(lambda: READ(m.s))
    for f in todo:
        v = f()
        if v is not None: x = x * v
    return x
"""),
    "generator consumed later": one("""
def step(m, x):
    g = (READ(m.s) * i for i in (1, 2))
    WRITE(m.s, 7)
    return x * sum(g)
"""),
    "default argument": one("""
def step(m, x):
    def f(v=READ(m.s)): return v
    WRITE(m.s, 7)
    return x * f() * READ(m.s)
"""),
    "holder in arguments": one("""
def use(s, *rest, k=None, **more):
    z = more["z"]
    return READ(s) + READ(rest[0]) + READ(k) + READ(z)
def step(m, x):
    y = x * use(m.s, m.s, k=m.s, z=m.s)
    WRITE(m.s, 7)
    return y + use(m.s, m.s, k=m.s, z=m.s)
"""),
    "copied": one("""
import copy
def step(m, x):
    c = copy.copy(m.s)
    y = x * READ(m.s)
    WRITE(m.s, 7)
    return y * READ(m.s)
"""),
    "layer replaced": layers("""
def between(i, m):
    if i == 2:
        m.layers[1] = Layer(NEW(7))
        m.holders.append(m.layers[1].s)
def step(m, x):
    for layer in m.layers: x = layer(x)
    return x
"""),
    "layer replaced in the step": layers("""
def step(m, x):
    x = m.layers[0](x)
    m.layers[1], m.layers[2] = m.layers[2], m.layers[1]
    for layer in m.layers: x = layer(x)
    return x
"""),
    "deleted and set": one("""
def step(m, x):
    y = x * READ(m.s)
    s = m.s
    del m.s
    WRITE(s, 7)
    m.s = s
    return y * READ(m.s)
"""),
    "in a tuple of holders": one("""
def prepare():
    m = Model(NEW(2))
    m.all = (m.s, [m.s], {"a": m.s})
    return m
def step(m, x):
    a, (b,), c = m.all
    y = x * READ(a)
    WRITE(b, 7)
    c = c["a"]
    y = y * READ(c)
    WRITE(c, 5)
    return y * READ(m.s)
"""),
    "two models in turn": layers("""
def step(m, x):
    for i in (0, 3, 0, 2):
        x = m.layers[i](x)
        if i == 3:
            WRITE(m.layers[0].s, 5)
    return x
"""),
    "layers with a pre-hook that writes": layers("""
def hook(module, args):
    WRITE(module.s, 5)
def prepare():
    m = Model([Layer(NEW(2)), Layer(NEW(3)), Layer(NEW(5)), Layer(NEW(2))])
    for layer in m.layers: layer.register_forward_pre_hook(hook)
    return m
def step(m, x):
    for layer in m.layers: x = layer(x)
    return x
"""),
    "full backward hook": layers("""
def hook(module, gi, go): return tuple(None if g is None else g * READ(module.s) for g in gi)
def prepare():
    m = Model([Layer(NEW(2)), Layer(NEW(3)), Layer(NEW(5)), Layer(NEW(2))])
    for layer in m.layers: layer.register_full_backward_hook(hook)
    return m
def step(m, x):
    y = x
    for layer in m.layers: y = layer(y)
    WRITE(m.layers[1].s, 7)
""" + BACKWARD),
    "hook after the gradient": one("""
def prepare():
    m = Model(NEW(2))
    def hook(p): p.grad = p.grad * READ(m.s)
    m.w.register_post_accumulate_grad_hook(hook)
    return m
def step(m, x):
    (x * m.w).sum().backward()
    WRITE(m.s, 5)
    (x * m.w).sum().backward()
    return x
"""),
    "hook on a parameter that came later": one("""
def put(m):
    WRITE(m.s, 7)
def between(i, m):
    if i == 2: m.w.register_hook(lambda g: put(m))
def step(m, x):
    (x * m.w).sum().backward()
    return x * READ(m.s)
"""),
    "hook after the gradient that came later": one("""
def put(m):
    WRITE(m.s, 7)
def between(i, m):
    if i == 2: m.w.register_post_accumulate_grad_hook(lambda p: put(m))
def step(m, x):
    (x * m.w).sum().backward()
    return x * READ(m.s)
"""),
    "two hooks": one("""
def step(m, x):
    y = (x * m.w).sin()
    z = y * 2
    def first(g):
        WRITE(m.s, 7)
    z.register_hook(first)
    y.register_hook(lambda g: g * READ(m.s))
    z.sum().backward()
    return z.detach()
"""),
    "saved tensors' hooks that write": one("""
def step(m, x):
    def pack(t):
        WRITE(m.s, 7)
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = (x * m.w).sin() * READ(m.s)
    y.sum().backward()
    return y.detach()
"""),
    "saved tensors' hooks": one("""
def step(m, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * READ(m.s)):
        y = (x * m.w).sin()
    WRITE(m.s, 7)
""" + BACKWARD),
    "setup_context": one("""
class F(torch.autograd.Function):
    @staticmethod
    def forward(x, m): return x * READ(m.s)
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.m, ctx.v = inputs[1], READ(inputs[1].s)
    @staticmethod
    def backward(ctx, g):
        m = ctx.m
        return g * ctx.v * READ(m.s), None
def step(m, x):
    y = F.apply(x * m.w, m)
    WRITE(m.s, 7)
""" + BACKWARD),
    "backward twice": one("""
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m):
        ctx.m = m
        return x * 2
    @staticmethod
    def backward(ctx, g):
        m = ctx.m
        return g * READ(m.s), None
def step(m, x):
    y = F.apply(x * m.w, m)
    y.sum().backward(retain_graph=True)
    WRITE(m.s, 7)
    y.sum().backward()
    return y.detach()
"""),
    **{f"backward after a break{name}": one(f"""
import moebius
from torch.utils.checkpoint import checkpoint
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m):
        ctx.m = m
        return x * 2
    @staticmethod
    def backward(ctx, g):
        m = ctx.m
        return g * READ(m.s), None
def part(x, m): return torch.sin(x * READ(m.s))
@moebius.disable
def native(s):
    WRITE(s, 5)
def step(m, x):
    y = {made}
    y.sum().backward(retain_graph=True)
    {between}
    y.sum().backward()
    return y.detach()
""") for name, made, between in (
        ("", "F.apply(x * m.w, m)", "native(m.s)"),
        (" and a write", "F.apply(x * m.w, m)", "native(m.s)\n    WRITE(m.s, 7)"),
        (", of a checkpoint", "checkpoint(part, x * m.w, m, use_reentrant=False)", "native(m.s)"),
    )},
    "first backward after a break": one("""
import moebius
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m):
        ctx.m = m
        return x * 2
    @staticmethod
    def backward(ctx, g):
        m = ctx.m
        return g * READ(m.s), None
@moebius.disable
def native(s):
    WRITE(s, 5)
def step(m, x):
    y = F.apply(x * m.w, m)
    native(m.s)
    y.sum().backward()
    return y.detach()
"""),
    **{f"backward outside{name}": one(f"""
from torch.utils.checkpoint import checkpoint
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m):
        ctx.m = m
        return x * 2
    @staticmethod
    def backward(ctx, g):
        m = ctx.m
        return g * READ(m.s), None
def part(x, m): return torch.sin(x * READ(m.s))
def prepare():
    m = Model(NEW(2))
    m.kept = []
    return m
def between(i, m):
    if i % 2: WRITE(m.s, 7)
    if m.kept: m.kept.pop().sum().backward()
    WRITE(m.s, 3)
def step(m, x):
    y = {made}
    m.kept.append(y)
    return y.detach()
""", how="outside") for name, made in (
        ("", "F.apply(x * m.w, m)"),
        (", of a checkpoint", "checkpoint(part, x * m.w, m, use_reentrant=False)"),
    )},
    "hook outside": one("""
def prepare():
    m = Model(NEW(2))
    m.kept = []
    return m
def between(i, m):
    if i % 2: WRITE(m.s, 7)
    if m.kept: m.kept.pop().sum().backward()
    WRITE(m.s, 3)
def step(m, x):
    y = (x * m.w).sin()
    y.register_hook(lambda g: g * READ(m.s))
    m.kept.append(y)
    return y.detach()
"""),
    "hook after a break": one("""
import moebius
@moebius.disable
def native(s):
    WRITE(s, 5)
def step(m, x):
    y = (x * m.w).sin()
    y.register_hook(lambda g: g * READ(m.s))
    y.sum().backward(retain_graph=True)
    native(m.s)
    y.sum().backward()
    return y.detach()
"""),
    "function in layers": layers("""
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        ctx.s = s
        return x * READ(s)
    @staticmethod
    def backward(ctx, g):
        s = ctx.s
        return g * READ(s), None
class Layer(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3,), 1.5))
        self.s = s
    def forward(self, x): return F.apply(x * self.w, self.s)
def step(m, x):
    y = x
    for layer in m.layers: y = layer(y)
    WRITE(m.layers[1].s, 7)
""" + BACKWARD),
    "torch.autograd.grad": one("""
def step(m, x):
    y = (x * m.w * READ(m.s)).sum()
    g, = torch.autograd.grad(y, [m.w], create_graph=True)
    WRITE(m.s, 3)
    z = (g * m.w * READ(m.s)).sum()
    z.backward()
    return z.detach()
"""),
    "checkpoint in a checkpoint": one("""
from torch.utils.checkpoint import checkpoint
def inner(x, m): return torch.sin(x * READ(m.s))
def part(x, m): return checkpoint(inner, x * m.w, m, use_reentrant=False) * READ(m.s)
def step(m, x):
    y = checkpoint(part, x, m, use_reentrant=False)
    WRITE(m.s, 7)
""" + BACKWARD),
    "checkpoint that branches": one("""
from torch.utils.checkpoint import checkpoint
def part(x, m):
    if READ(m.s) > 2: return torch.sin(x * m.w) * 2
    return torch.sin(x * m.w) * 3
def step(m, x):
    y = checkpoint(part, x, m, use_reentrant=False)
    WRITE(m.s, 7)
    y.sum().backward()
    WRITE(m.s, 2)
    return y.detach()
"""),
    "checkpoint under no_grad": one("""
from torch.utils.checkpoint import checkpoint
def part(x, m): return torch.sin(x * m.w * READ(m.s))
def step(m, x):
    with torch.no_grad(): y = checkpoint(part, x, m, use_reentrant=False)
    WRITE(m.s, 7)
    return y * READ(m.s)
"""),
    "cached in a checkpoint": one("""
from torch.utils.checkpoint import checkpoint
@functools.lru_cache
def cached(n, m): return READ(m.s)
def prepare():
    cached.cache_clear()
    return Model(NEW(2))
def part(x, m): return torch.sin(x * m.w * cached(1, m))
def step(m, x):
    y = checkpoint(part, x, m, use_reentrant=False)
    WRITE(m.s, 7)
""" + BACKWARD),
    "cached by a cached one": one("""
@functools.lru_cache
def deeper(n, m): return READ(m.s)
@functools.lru_cache
def cached(n, m): return deeper(n, m) + 1
def prepare():
    cached.cache_clear()
    deeper.cache_clear()
    return Model(NEW(2))
def step(m, x):
    WRITE(m.s, 7)
    y = x * cached(1, m)
    WRITE(m.s, 3)
    return y + deeper(1, m) + cached(2, m)
"""),
    "cached one that raises": one("""
@functools.lru_cache
def cached(n, m):
    if READ(m.s) != 7: raise ValueError("no")
    return n
def prepare():
    cached.cache_clear()
    return Model(NEW(2))
def step(m, x):
    for i in range(2):
        try: x = x + cached(2, m)
        except ValueError: x = x * 2
        WRITE(m.s, 7)
    return x
"""),
    "cached_property of the model": one("""
class Held(Model):
    @functools.cached_property
    def look(self): return READ(self.s)
def prepare(): return Held(NEW(2))
def step(m, x):
    WRITE(m.s, 7)
    y = x * m.look
    WRITE(m.s, 3)
    return y * m.look
"""),
    "layers in a try": layers("""
def step(m, x):
    for i, layer in enumerate(m.layers):
        try:
            x = layer(x)
            if i % 2: x = x @ torch.ones(2)
        except RuntimeError:
            WRITE(layer.s, 7)
    return x
"""),
    "tried again": one("""
def step(m, x):
    for i in range(2):
        try:
            y = x * READ(m.s)
            y = y @ torch.ones(2 + i)
            return y * READ(m.s)
        except RuntimeError:
            WRITE(m.s, 7)
"""),
    "raised anew": one("""
def inner(m, x):
    try:
        WRITE(m.s, 7)
        return x @ torch.ones(2)
    except RuntimeError as e:
        WRITE(m.s, 5)
        raise ValueError("no") from e
    finally:
        x = x * READ(m.s)
def step(m, x):
    try: return inner(m, x)
    except ValueError as e: return x * READ(m.s) + len(str(e))
"""),
    "suppressed": one("""
def step(m, x):
    y = x
    with contextlib.suppress(RuntimeError):
        WRITE(m.s, 7)
        y = y @ torch.ones(2)
        WRITE(m.s, 5)
    return y * READ(m.s)
"""),
    "failure in a checkpoint": one("""
from torch.utils.checkpoint import checkpoint
def part(x, m):
    WRITE(m.s, 7)
    return (x * m.w) @ torch.ones(2)
def step(m, x):
    try: y = checkpoint(part, x, m, use_reentrant=False)
    except RuntimeError: y = x * m.w * READ(m.s)
""" + BACKWARD),
    "failure in backward": one("""
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m):
        ctx.m = m
        return x * 2
    @staticmethod
    def backward(ctx, g):
        m = ctx.m
        WRITE(m.s, 7)
        raise ValueError("no")
def step(m, x):
    y = F.apply(x * m.w, m)
    try: y.sum().backward()
    except ValueError: y = y * READ(m.s)
    return y.detach()
"""),
    "while on data": one("""
def step(m, x):
    n = 0
    while x.sum() < 60:
        x = x * READ(m.s)
        WRITE(m.s, 3)
        n += 1
    return x + n
"""),
    "left on data": one("""
def step(m, x):
    for i in range(4):
        x = x * READ(m.s)
        if x.sum() > 40: break
        WRITE(m.s, 3)
    else:
        WRITE(m.s, 5)
    return x
"""),
    "returned on data from a with": one("""
@contextlib.contextmanager
def put(m):
    WRITE(m.s, 7)
    try: yield
    finally:
        WRITE(m.s, 3)
def step(m, x):
    with put(m):
        if x.sum() > 7: return x * READ(m.s)
        x = x + READ(m.s)
    return x * READ(m.s)
"""),
    "side exit in a layer": layers("""
class Layer(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3,), 0.5))
        self.s = s
    def forward(self, x):
        if x.sum() > 20:
            WRITE(self.s, 3)
            return x * self.w
        return x * self.w * READ(self.s)
def step(m, x):
    for layer in m.layers: x = layer(x)
    return x
"""),
    "a row that raises": one("""
def step(m, x):
    y = torch.zeros_like(x)
    try:
        for e in range(3):
            row = torch.where(x.long() == e)[0]
            if row.numel() == 0: continue
            WRITE(m.s, 5)
            y.index_add_(0, row, x[row] * READ(m.s))
            if e == 2: raise ValueError("no")
    except ValueError: y = y * READ(m.s)
    return y
"""),
    "break in a with in a try": one("""
@contextlib.contextmanager
def put(m):
    WRITE(m.s, 7)
    try: yield READ(m.s)
    finally:
        WRITE(m.s, 3)
def inner(m, x):
    for i in range(2):
        try:
            with put(m) as v:
                x = x * v
                torch._dynamo.graph_break()
                x = x * READ(m.s)
        finally:
            WRITE(m.s, 5)
    return x
def step(m, x): return inner(m, x) * READ(m.s)
"""),
    "break in a generator": one("""
def each(m):
    yield READ(m.s)
    WRITE(m.s, 7)
    torch._dynamo.graph_break()
    yield READ(m.s)
def step(m, x):
    for v in each(m): x = x * v
    return x * READ(m.s)
"""),
    "break in a special method": one("""
class A:
    def __init__(self, m): self.m = m
    def __add__(self, other):
        m = self.m
        WRITE(m.s, 7)
        torch._dynamo.graph_break()
        return other * READ(m.s)
def step(m, x):
    y = x * READ(m.s)
    y = A(m) + y
    return y * READ(m.s)
"""),
    "break in a hook": layers("""
def hook(module, args, out):
    v = READ(module.s)
    WRITE(module.s, 5)
    torch._dynamo.graph_break()
    return out * v * READ(module.s)
def prepare():
    m = Model([Layer(NEW(2)), Layer(NEW(3))])
    for layer in m.layers: layer.register_forward_hook(hook)
    return m
def step(m, x):
    for layer in m.layers: x = layer(x)
    return x
"""),
    "break between layers": layers("""
def step(m, x):
    for layer in m.layers:
        x = layer(x)
        WRITE(layer.s, 5)
        print(float(x.sum()))
        x = layer(x)
    return x
"""),
    "break, then backward": one("""
def step(m, x):
    y = x * m.w * READ(m.s)
    WRITE(m.s, 7)
    torch._dynamo.graph_break()
    y = y * READ(m.s)
""" + BACKWARD),
    "nested captures with a break": one("""
import moebius
def look(m, x):
    y = x * READ(m.s)
    WRITE(m.s, 7)
    torch._dynamo.graph_break()
    return y * READ(m.s)
inner = moebius.capture(look) if CAPTURED else look
def step(m, x):
    WRITE(m.s, 3)
    y = inner(m, x)
    WRITE(m.s, 5)
    return inner(m, y) * READ(m.s)
"""),
    "nested captures that fail": one("""
import moebius
def look(m, x):
    WRITE(m.s, 7)
    return x @ torch.ones(2)
inner = moebius.capture(look) if CAPTURED else look
def step(m, x):
    try: y = inner(m, x)
    except RuntimeError: y = x * READ(m.s)
    WRITE(m.s, 3)
    return y * READ(m.s)
"""),
    "accumulated": one("""
def prepare():
    m = Model(NEW(2))
    m.opt = [torch.optim.AdamW([m.w], lr=0.1)]
    return m
def step(m, x):
    for i in range(3):
        (x * m.w * READ(m.s)).sum().backward()
        if i == 0: WRITE(m.s, 3)
    m.opt[0].step()
    m.opt[0].zero_grad()
    WRITE(m.s, 2)
    return (x * m.w).detach()
"""),
    "closure of an optimizer": one("""
def prepare():
    m = Model(NEW(2))
    m.opt = [torch.optim.SGD([m.w], lr=0.1)]
    return m
def step(m, x):
    def closure():
        m.opt[0].zero_grad()
        loss = (x * m.w * READ(m.s)).sum()
        loss.backward()
        WRITE(m.s, 3)
        return loss
    return m.opt[0].step(closure).detach() * READ(m.s)
"""),
    "schedule": one("""
def prepare():
    m = Model(NEW(2))
    opt = torch.optim.SGD([m.w], lr=0.1)
    m.opt = [opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda e: float(READ(m.s)))]
    return m
def step(m, x):
    (x * m.w).sum().backward()
    m.opt[0].step()
    WRITE(m.s, 3)
    m.opt[1].step()
    return x
"""),
    "a hook of the optimizer": one("""
def prepare():
    m = Model(NEW(2))
    m.opt = [torch.optim.SGD([m.w], lr=0.1)]
    def hook(opt, args, kwargs):
        m.w.grad.mul_(READ(m.s))
    m.opt[0].register_step_pre_hook(hook)
    return m
def step(m, x):
    (x * m.w).sum().backward()
    WRITE(m.s, 3)
    m.opt[0].step()
    m.opt[0].zero_grad()
    WRITE(m.s, 2)
    return (x * m.w).detach()
"""),
    "functional_call": one("""
class Inner(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))
        self.s = s
    def forward(self, x): return x * self.w * READ(self.s)
def prepare():
    m = Model(NEW(2))
    m.inner = Inner(m.s)
    return m
def step(m, x):
    y = torch.func.functional_call(m.inner, {"w": m.w * 2}, (x,))
    WRITE(m.s, 7)
    return y * m.inner(x)
"""),
    "decorated": one("""
def doubled(f):
    @functools.wraps(f)
    def g(m, x):
        WRITE(m.s, 7)
        return f(m, x) * READ(m.s)
    return g
@torch.no_grad()
@doubled
def f(m, x): return x * m.w * READ(m.s)
def step(m, x): return x * READ(m.s) + f(m, x)
"""),
    "written under no_grad": one("""
def step(m, x):
    y = x * m.w * READ(m.s)
    with torch.no_grad():
        WRITE(m.s, 7)
        z = m.w * READ(m.s)
    return y + z
"""),
    "deep in containers": one("""
def prepare():
    m = Model(NEW(2))
    m.deep = {"a": [types.SimpleNamespace(b=(m.s,))]}
    return m
def step(m, x):
    s = m.deep["a"][0].b[0]
    y = x * READ(m.s)
    WRITE(s, 7)
    s = m.deep["a"][-1].b[0]
    return y * READ(s)
"""),
    "kept by the step": one("""
def step(m, x):
    y = x * READ(m.s)
    m.kept = getattr(m, "kept", []) + [READ(m.s)]
    WRITE(m.s, 7)
    return y * sum(m.kept)
"""),
    "returned holder": one("""
def step(m, x):
    WRITE(m.s, 7)
    return x * READ(m.s), m.s is m.holders[0]
"""),
    "written last": layers("def step(m, x):\n" + THROUGH + "    WRITE(m.layers[0].s, 5)\n    return x\n"),
    "written in one layer only": layers("""
class Layer(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3,), 1.5))
        self.s, self.first = s, False
    def forward(self, x):
        if self.first:
            WRITE(self.s, 7)
        return x * self.w * READ(self.s)
def prepare():
    m = Model([Layer(NEW(2)), Layer(NEW(2)), Layer(NEW(2))])
    m.layers[1].first = True
    return m
def step(m, x):
    for layer in m.layers: x = layer(x)
    return x
"""),
    "layers of layers": layers("""
class Pair(torch.nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = a, b
    def forward(self, x): return self.b(self.a(x))
def prepare():
    found = [Layer(NEW(2)), Layer(NEW(3)), Layer(NEW(2)), Layer(NEW(5))]
    m = Model(found)
    m.pairs = torch.nn.Sequential(Pair(found[0], found[1]), Pair(found[2], found[3]))
    return m
def step(m, x):
    x = m.pairs(x)
    WRITE(m.layers[3].s, 7)
    return m.pairs(x)
"""),
}
