"""Kinds of state: every place where Python and torch let a step keep something. One entry each.

make: an expression that makes a holder with the value ``$`` in it (``$`` is 2, 3, 5 or 7); read: an expression over the
holder ``@`` that gives a number or tensor; write: statements that put ``$`` there. before: what the program defines for
it; after: how a process-wide place is put back.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    make: str
    read: str
    write: str
    before: str = ""
    after: str = ""


CELL = """
def cell(v):
    def get(): return v
    def put(new):
        nonlocal v
        v = new
    return types.SimpleNamespace(get=get, put=put)
"""
CLASSES = """
class Plain:
    v = 1
    def __init__(self, v=None):
        if v is not None: self.v = v
class Slot:
    __slots__ = ("v",)
    def __init__(self, v): self.v = v
class Prop:
    def __init__(self, v): self.held = v
    @property
    def v(self): return self.held
    @v.setter
    def v(self, new): self.held = new
class Descriptor:
    def __get__(self, obj, cls=None): return obj.__dict__["v"]
    def __set__(self, obj, new): obj.__dict__["v"] = new
class Described:
    v = Descriptor()
    def __init__(self, v): self.v = v
class Fallback:
    def __init__(self, v): self.data = {"v": v}
    def __getattr__(self, name):
        try: return self.__dict__["data"][name]
        except KeyError: raise AttributeError(name) from None
class Indexed:
    def __init__(self, v): self.rows = [v]
    def __getitem__(self, i): return self.rows[i]
    def __setitem__(self, i, new): self.rows[i] = new
    def __len__(self): return self.rows[0]
class Two:
    def v(self): return 2
class Three:
    def v(self): return 3
class Five:
    def v(self): return 5
class Seven:
    def v(self): return 7
BY = {2: Two, 3: Three, 5: Five, 7: Seven}
class Cached:
    def __init__(self, v): self.base = v
    @functools.cached_property
    def v(self): return self.base
@dataclasses.dataclass
class Data:
    v: int
@dataclasses.dataclass(frozen=True)
class Frozen:
    v: int
Row = collections.namedtuple("Row", "v w")
def of(v): return BY[v]()
def classy(v): return type("Classy", (), {"v": v})
"""
FUNCTION = """
def function(v):
    def inner(v=v): return v
    return inner
def keyword(v):
    def inner(*, v=v): return v
    return inner
def marked(v):
    def inner(): return inner.v
    inner.v = v
    return inner
"""
GLOBAL = """
GV = 1
def set_global(v):
    global GV
    GV = v
"""
CONTEXT = 'CV = contextvars.ContextVar("CV")\n'
TENSORS = """
def with_attribute(t, v):
    t.v = v
    return t
def layer_of(**given):
    m = torch.nn.Module()
    for name, value in given.items(): setattr(m, name, value)
    return m
def parameter(v): return torch.nn.Parameter(torch.full((), float(v)))
def buffered(v):
    m = torch.nn.Module()
    m.register_buffer("b", torch.full((), float(v)))
    return m
def hooked(v):
    m = torch.nn.Identity()
    m.register_forward_hook(lambda mod, args, out: out * v)
    return m
def rehook(m, v):
    m._forward_hooks.clear()
    m.register_forward_hook(lambda mod, args, out: out * v)
def optimizer(v):
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=float(v), momentum=0.5)
def adam(v):
    o = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    o.state[o.param_groups[0]["params"][0]]["n"] = v
    return o
"""
ONCE = """
CALLS = [0]
@functools.lru_cache(maxsize=None)
def once():
    return CALLS[0]
def fill(v):
    once.cache_clear()
    CALLS[0] = v
    once()
    CALLS[0] = 100
"""
KEYS = "KEYS = {n: object() for n in (2, 3, 5, 7)}\n"
THREE = "(2.0 if {} else 3.0)"  # of a place that is on or off

KINDS: dict[str, Kind] = {
    # containers
    "dict entry": Kind('{"v": $}', '@["v"]', '@["v"] = $'),
    "dict order": Kind(
        "dict.fromkeys([2, 3, 5, 7, $])", "list(@)[-1]", "@.pop($, None); @[$] = 0"
    ),
    "dict length": Kind("dict.fromkeys(range($))", "len(@)", "@.clear(); @.update(dict.fromkeys(range($)))"),
    "dict membership": Kind("{$: 1}", THREE.format("3 in @"), "@.clear(); @[$] = 1"),
    "dict get": Kind('{"v": $}', '@.get("v", 1)', '@.pop("v", None); @.setdefault("v", $)'),
    "dict values": Kind('{"v": $}', "sum(@.values())", "@.update(v=$)"),
    "dict keys": Kind("{$: 1}", "max(set(@))", "@.clear(); @[$] = 1"),
    "dict entry by object": Kind("{KEYS[2]: $}", "@[KEYS[2]]", "@[KEYS[2]] = $", KEYS),
    "object in a dict": Kind("{KEYS[$]: 1}", THREE.format("KEYS[3] in @"), "@.clear(); @[KEYS[$]] = 1", KEYS),
    "object in a set": Kind("{KEYS[$]}", THREE.format("KEYS[3] in @"), "@.clear(); @.add(KEYS[$])", KEYS),
    "nested dict": Kind('{"a": {"b": [$]}}', '@["a"]["b"][0]', '@["a"]["b"][0] = $'),
    "list item": Kind("[$]", "@[0]", "@[0] = $"),
    "list length": Kind("[0] * $", "len(@)", "@[:] = [0] * $"),
    "list append": Kind("[$]", "@[-1]", "@.append($)"),
    "list order": Kind("[2, 3, 5, 7]", "@[0]", "@.remove($); @.insert(0, $)"),
    "set": Kind("{$}", "max(@)", "@.clear(); @.add($)"),
    "set membership": Kind("{$}", THREE.format("3 in @"), "@.clear(); @.add($)"),
    "deque": Kind("collections.deque([$], 2)", "@[-1]", "@.append($)"),
    "Counter": Kind("collections.Counter(v=$)", '@["v"]', '@["v"] = $'),
    "Counter update": Kind("collections.Counter(v=$)", '@["v"]', '@.update(["v"])'),
    "defaultdict": Kind("collections.defaultdict(lambda: 3, v=$)", '@["v"]', '@["v"] = $'),
    "OrderedDict": Kind(
        "collections.OrderedDict.fromkeys([2, 3, 5, 7, $])", "next(reversed(@))", "@.move_to_end($)"
    ),
    "ChainMap": Kind("collections.ChainMap({}, {'v': $})", '@["v"]', '@["v"] = $'),
    "UserDict": Kind("collections.UserDict(v=$)", '@["v"]', '@["v"] = $'),
    "array": Kind('array.array("i", [$])', "@[0]", "@[0] = $"),
    "bytearray": Kind("bytearray([$])", "@[0]", "@[0] = $"),
    "memoryview": Kind("memoryview(bytearray([$]))", "@[0]", "@[0] = $"),
    "numpy": Kind("numpy.array([$])", "int(@[0])", "@[0] = $"),
    "ctypes": Kind("ctypes.c_int($)", "@.value", "@.value = $"),
    "ctypes array": Kind("(ctypes.c_int * 1)($)", "@[0]", "@[0] = $"),
    "StringIO": Kind("io.StringIO('x' * $)", "len(@.getvalue())", "@.write('x' * $)"),
    "queue": Kind("queue.SimpleQueue()", "@.qsize() + 1", "@.put($)"),
    "weak keys": Kind("weakly($)", "@.table[@.key]", "@.table[@.key] = $", CLASSES + """
def weakly(v):
    key = Plain(1)
    table = weakref.WeakKeyDictionary()
    table[key] = v
    return types.SimpleNamespace(key=key, table=table)
"""),
    "weak values": Kind("weakly($)", '@.table["v"].v', '@.kept.append(Plain($))\n@.table["v"] = @.kept[-1]',
                        CLASSES + """
def weakly(v):
    kept = [Plain(v)]
    table = weakref.WeakValueDictionary()
    table["v"] = kept[0]
    return types.SimpleNamespace(kept=kept, table=table)
"""),
    # objects
    "attribute": Kind("Plain($)", "@.v", "@.v = $", CLASSES),
    "attribute that may miss": Kind(
        "Plain()", THREE.format('hasattr(@, "w")'), "@.w = $\nif $ == 3:\n    del @.w", CLASSES
    ),
    "setattr": Kind("Plain($)", 'getattr(@, "v")', 'setattr(@, "v", $)', CLASSES),
    "vars": Kind("Plain($)", '@.__dict__["v"]', '@.__dict__["v"] = $', CLASSES),
    "deleted attribute": Kind("Plain($)", "@.v", '@.__dict__.pop("v", None)\nif $ != 3:\n    @.v = $', CLASSES),
    "slot": Kind("Slot($)", "@.v", "@.v = $", CLASSES),
    "property": Kind("Prop($)", "@.v", "@.v = $", CLASSES),
    "descriptor": Kind("Described($)", "@.v", "@.v = $", CLASSES),
    "__getattr__": Kind("Fallback($)", "@.v", '@.data["v"] = $', CLASSES),
    "__getitem__": Kind("Indexed($)", "@[0]", "@[0] = $", CLASSES),
    "__len__": Kind("Indexed($)", "len(@)", "@[0] = $", CLASSES),
    "cached property": Kind("Cached($)", "@.v", '@.base = $; @.__dict__.pop("v", None)', CLASSES),
    "SimpleNamespace": Kind("types.SimpleNamespace(v=$)", "@.v", "@.v = $"),
    "dataclass": Kind("Data($)", "@.v", "@.v = $", CLASSES),
    "frozen dataclass": Kind("Frozen($)", "@.v", 'object.__setattr__(@, "v", $)', CLASSES),
    "dataclass replaced": Kind("[Data($)]", "@[0].v", "@[0] = dataclasses.replace(@[0], v=$)", CLASSES),
    "namedtuple": Kind("[Row($, 0)]", "@[0].v", "@[0] = @[0]._replace(v=$)", CLASSES),
    "tuple": Kind("[($, 0)]", "@[0][0]", "@[0] = ($, 1)"),
    "class attribute": Kind("classy($)", "@.v", "@.v = $", CLASSES),
    "class of an object": Kind("classy($)()", "@.v", "type(@).v = $", CLASSES),
    "attribute over the class's": Kind("classy($)()", "@.v", "@.v = $", CLASSES),
    "__class__": Kind("of($)", "@.v()", "@.__class__ = BY[$]", CLASSES),
    "type()": Kind("of($)", "{Two: 2, Three: 3, Five: 5, Seven: 7}[type(@)]", "@.__class__ = BY[$]", CLASSES),
    "isinstance": Kind("of($)", THREE.format("isinstance(@, Three)"), "@.__class__ = BY[$]", CLASSES),
    "__dict__": Kind("Plain($)", "@.v", '@.__dict__ = {"v": $}', CLASSES),
    "method replaced": Kind("of($)", "@.v()", "@.v = lambda: $", CLASSES),
    "exception": Kind("ValueError($)", "@.args[0]", "@.args = ($,)"),
    "thread local": Kind("local($)", "@.v", "@.v = $", """
def local(v):
    held = threading.local()
    held.v = v
    return held
"""),
    "lock": Kind("threading.Lock()", THREE.format("@.locked()"),
                 "@.locked() and @.release()\nif $ == 3:\n    @.acquire()"),
    "partial": Kind("[functools.partial(pow, $)]", "@[0](1)", "@[0] = functools.partial(pow, $)"),
    "partial's keywords": Kind("functools.partial(dict, v=$)", '@()["v"]', '@.keywords["v"] = $'),
    # functions
    "cell": Kind("cell($)", "@.get()", "@.put($)", CELL),
    "cell_contents": Kind("cell($)", "@.get()", "@.get.__closure__[0].cell_contents = $", CELL),
    "default": Kind("function($)", "@()", "@.__defaults__ = ($,)", FUNCTION),
    "keyword default": Kind("keyword($)", "@()", '@.__kwdefaults__["v"] = $', FUNCTION),
    "keyword defaults": Kind("keyword($)", "@()", '@.__kwdefaults__ = {"v": $}', FUNCTION),
    "function attribute": Kind("marked($)", "@()", "@.v = $", FUNCTION),
    "__code__": Kind("function(2)", "@()", "@.__code__ = CODES[$]", FUNCTION + """
CODES = {2: (lambda v: 2).__code__, 3: (lambda v: 3).__code__, 5: (lambda v: 5).__code__, 7: (lambda v: 7).__code__}
CODES = {n: c.replace(co_freevars=()) for n, c in CODES.items()}
"""),
    "global": Kind("set_global($)", "GV", "set_global($)", GLOBAL),
    "globals()": Kind("set_global($)", "GV", 'globals()["GV"] = $', GLOBAL),
    "module": Kind("module($)", "@.v", "@.v = $", """
def module(v):
    m = types.ModuleType("m")
    m.v = v
    return m
"""),
    "builtins": Kind("setattr(builtins, 'bv', $)", "bv", "builtins.bv = $", "", "del builtins.bv"),
    "sys attribute": Kind("setattr(sys, 'sv', $)", "sys.sv", "sys.sv = $", "", "del sys.sv"),
    "sys.modules": Kind(
        "sys.modules.update(smv=types.SimpleNamespace(v=$))", "sys.modules['smv'].v",
        "sys.modules['smv'] = types.SimpleNamespace(v=$)", "", "del sys.modules['smv']",
    ),
    "context variable": Kind("CV.set($) and None", "CV.get()", "CV.set($)", CONTEXT),
    "lru_cache": Kind("fill($)", "once()", "fill($)", ONCE),
    "singledispatch": Kind("dispatched($)", "@(1)", "@.register(int, REPLIES[$])", """
REPLIES = {2: lambda x: 2, 3: lambda x: 3, 5: lambda x: 5, 7: lambda x: 7}
def dispatched(v):
    f = functools.singledispatch(lambda x: 1)
    f.register(int, REPLIES[v])
    return f
"""),
    # positions
    "iterator": Kind("iter([$, 2, 3, 5, 7] * 40)", "next(@)", "next(@)"),
    "iterator's rest": Kind("iter([0] * (200 + $))", "@.__length_hint__()", "next(@)"),
    "generator": Kind("going($)", "next(@)", "next(@)", """
def going(v):
    while True: yield v; v += 1
"""),
    "count": Kind("itertools.count($)", "next(@)", "next(@)"),
    "cycle": Kind("itertools.cycle([$, 2, 3])", "next(@)", "next(@)"),
    # the process
    "os.environ": Kind('os.environ.update(MBV="$")', 'int(os.environ["MBV"])', 'os.environ["MBV"] = "$"', "",
                       'del os.environ["MBV"]'),
    "recursion limit": Kind("sys.setrecursionlimit(1000 + $)", "sys.getrecursionlimit() - 1000",
                            "sys.setrecursionlimit(1000 + $)", "", "sys.setrecursionlimit(1000)"),
    "logging level": Kind("logging.getLogger('mbv').setLevel($)", "logging.getLogger('mbv').level",
                          "logging.getLogger('mbv').setLevel($)"),
    "logger enabled": Kind("logging.getLogger('mbw').setLevel(10 * $)",
                           THREE.format("logging.getLogger('mbw').isEnabledFor(40)"),
                           "logging.getLogger('mbw').setLevel(10 * $)"),
    "warning filters": Kind("warnings.simplefilter('ignore')", "sum(f[1] in PUT for f in warnings.filters)",
                            "warnings.filterwarnings('ignore', message='$' * $)",
                            "import re\nKEPT = warnings.filters[:]\n"  # (what is imported late puts filters of its own)
                            "PUT = [re.compile(str(n) * n, re.I) for n in (2, 3, 5, 7)]\n",
                            "warnings.filters[:] = KEPT"),
    "decimal": Kind("setattr(decimal.getcontext(), 'prec', $)", "decimal.getcontext().prec",
                    "decimal.getcontext().prec = $", "", "decimal.getcontext().prec = 28"),
    "directory": Kind("os.umask($)", "twice(os.umask)", "os.umask($)", """
def twice(f):
    v = f(0)
    f(v)
    return v
UM = os.umask(0)
os.umask(UM)
""", "os.umask(UM)"),
    "random": Kind("random.seed($)", "random.random()", "random.seed($)"),
    "Random": Kind("random.Random($)", "@.random()", "@.seed($)"),
    "numpy.random": Kind("numpy.random.seed($)", "float(numpy.random.rand())", "numpy.random.seed($)"),
    # torch's switches
    "torch.manual_seed": Kind("torch.manual_seed($) and None", "torch.rand(())", "torch.manual_seed($)"),
    "Generator": Kind("torch.Generator().manual_seed($)", "torch.rand((), generator=@)", "@.manual_seed($)"),
    "default dtype": Kind("torch.set_default_dtype(torch.float32)",
                          THREE.format("torch.get_default_dtype() is torch.float64"),
                          "torch.set_default_dtype(torch.float64 if $ == 3 else torch.float32)", "",
                          "torch.set_default_dtype(torch.float32)"),
    "grad mode": Kind("torch.set_grad_enabled(True) and None", THREE.format("torch.is_grad_enabled()"),
                      "torch.set_grad_enabled($ != 3)", "", "torch.set_grad_enabled(True)"),
    "autocast": Kind("torch.set_autocast_enabled('cpu', False)", THREE.format("torch.is_autocast_enabled('cpu')"),
                     "torch.set_autocast_enabled('cpu', $ == 3)", "", "torch.set_autocast_enabled('cpu', False)"),
    "deterministic": Kind("torch.use_deterministic_algorithms(False)",
                          THREE.format("torch.are_deterministic_algorithms_enabled()"),
                          "torch.use_deterministic_algorithms($ == 3)", "",
                          "torch.use_deterministic_algorithms(False)"),
    "threads": Kind("torch.set_num_threads(1)", "torch.get_num_threads()", "torch.set_num_threads(1 + ($ == 3))", "",
                    "torch.set_num_threads(1)"),
    "matmul precision": Kind("torch.set_float32_matmul_precision('highest')",
                             THREE.format("torch.get_float32_matmul_precision() == 'high'"),
                             "torch.set_float32_matmul_precision('high' if $ == 3 else 'highest')", "",
                             "torch.set_float32_matmul_precision('highest')"),
    "cudnn flag": Kind("setattr(torch.backends.cudnn, 'benchmark', False)",
                       THREE.format("torch.backends.cudnn.benchmark"),
                       "torch.backends.cudnn.benchmark = $ == 3", "", "torch.backends.cudnn.benchmark = False"),
    "attention's switch": Kind("torch.backends.cuda.enable_flash_sdp(True)",
                               THREE.format("torch.backends.cuda.flash_sdp_enabled()"),
                               "torch.backends.cuda.enable_flash_sdp($ == 3)", "",
                               "torch.backends.cuda.enable_flash_sdp(True)"),
    # tensors
    "tensor": Kind("torch.full((), float($))", "@", "@.fill_($)"),
    "tensor replaced": Kind("[torch.full((), float($))]", "@[0]", "@[0] = torch.full((), float($))"),
    "tensor size": Kind("[torch.ones($)]", "@[0].shape[0]", "@[0] = torch.ones($)"),
    "tensor resized": Kind("torch.ones($)", "@.shape[0]", "@.resize_($).fill_(1)"),
    "tensor attribute": Kind("with_attribute(torch.ones(()), $)", "@.v", "@.v = $", TENSORS),
    "parameter attribute": Kind("with_attribute(parameter(1), $)", "@.v", "@.v = $", TENSORS),
    "parameter's __dict__": Kind("with_attribute(parameter(1), $)", '@.__dict__["v"]', '@.__dict__["v"] = $', TENSORS),
    "parameter vars": Kind("with_attribute(parameter(1), $)", 'vars(@).get("v", 1)', 'vars(@)["v"] = $', TENSORS),
    "parameter hasattr": Kind("parameter(1)", THREE.format('hasattr(@, "w")'), "@.w = $", TENSORS),
    "parameter getattr": Kind("parameter(1)", 'getattr(@, "w", 2)', "@.w = $", TENSORS),
    "buffer attribute": Kind("buffered(1)", 'getattr(@.b, "v", 1)', "@.b.v = $", TENSORS),
    "module's parameter": Kind("layer_of(w=parameter($))", "@.w", "@.w = parameter($)", TENSORS),
    "register_parameter": Kind("layer_of(w=parameter($))", "len(list(@.parameters()))",
                               'setattr(@, "w$", parameter($))', TENSORS),
    "buffer": Kind("buffered($)", "@.b", "@.b = torch.full((), float($))", TENSORS),
    "buffer in place": Kind("buffered($)", "@.b", "@.b.fill_($)", TENSORS),
    "_buffers": Kind("buffered($)", '@._buffers["b"]', '@._buffers["b"] = torch.full((), float($))', TENSORS),
    "requires_grad": Kind("parameter(1)", THREE.format("@.requires_grad"), "@.requires_grad = $ == 3", TENSORS),
    "requires_grad_": Kind("parameter(1)", THREE.format("@.requires_grad"), "@.requires_grad_($ == 3)", TENSORS),
    ".grad": Kind("parameter(1)", THREE.format("@.grad is None"),
                  "@.grad = None if $ == 3 else torch.full((), float($))", TENSORS),
    ".grad's value": Kind("parameter(1)", "(1 if @.grad is None else @.grad)", "@.grad = torch.full((), float($))",
                          TENSORS),
    ".data": Kind("parameter($)", "@.detach()", "@.data = torch.full((), float($))", TENSORS),
    "copy_": Kind("parameter($)", "@.detach()", "@.data.copy_(torch.full((), float($)))", TENSORS),
    "_version": Kind("torch.ones(())", "@._version", "@.fill_($)"),
    # modules and optimizers
    "training": Kind("torch.nn.Dropout(0.0)", THREE.format("@.training"), "@.train($ == 3)", TENSORS),
    "module attribute": Kind("layer_of(v=$)", "@.v", "@.v = $", TENSORS),
    "submodule": Kind("layer_of(child=layer_of(v=$))", "@.child.v", "@.child = layer_of(v=$)", TENSORS),
    "ModuleList": Kind("torch.nn.ModuleList([layer_of(v=$)])", "@[-1].v", "@.append(layer_of(v=$))", TENSORS),
    "forward hook": Kind("hooked($)", "@(torch.ones(()))", "rehook(@, $)", TENSORS),
    "forward replaced": Kind("torch.nn.Identity()", "@(torch.ones(()))", "@.forward = lambda x: x * $"),
    "param_groups": Kind("optimizer($)", '@.param_groups[0]["lr"]', '@.param_groups[0]["lr"] = float($)', TENSORS),
    "optimizer state": Kind("adam($)", '@.state[@.param_groups[0]["params"][0]]["n"]',
                            '@.state[@.param_groups[0]["params"][0]]["n"] = $', TENSORS),
    "optimizer defaults": Kind("optimizer($)", '@.defaults["lr"]', '@.defaults["lr"] = float($)', TENSORS),
}
