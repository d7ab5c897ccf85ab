"""Further kinds of state (see ``kinds``): special methods that classes are given, identity, what libraries keep for the
process, and what torch keeps beside its tensors."""

from __future__ import annotations

from .kinds import CLASSES, TENSORS, Kind

GIVEN = """
def given(name, method): return type("G", (), {name: method})()
class Base: pass
def derived(v):
    base = type("B", (Base,), {"v": lambda self: v})
    return type("D", (base,), {})()
"""
# Special methods that a class is given anew: an expression that asks for it, and its parameters and result.
METHODS = {
    "__getitem__": ("@[0]", "self, i", "{}"),
    "__next__": ("next(@)", "self", "{}"),
    "__lt__": ("(2.0 if @ < 4 else 3.0)", "self, o", "{} == 3"),
    "__hash__": ("hash(@)", "self", "{}"),
    "__int__": ("int(@)", "self", "{}"),
    "__index__": ("range(99)[@]", "self", "{}"),
    "__float__": ("float(@)", "self", "{} * 1.0"),
    "__neg__": ("-@", "self", "{}"),
    "__radd__": ("(1 + @)", "self, o", "{} + o"),
    "__rmul__": ("(1 * @)", "self, o", "{} * o"),
    "__iadd__": ("iadd(@)", "self, o", "{} + o"),
    "__matmul__": ("operator.matmul(@, 1)", "self, o", "{}"),
    "__str__": ("len(str(@))", "self", "'x' * {}"),
    "__repr__": ("len(repr(@))", "self", "'x' * {}"),
    "__format__": ("len(f'{@}')", "self, spec", "'x' * {}"),
    "__getattr__": ("@.other", "self, name", "{}"),
    "__enter__": ("entered(@)", "self", "{}"),
    "__reversed__": ("list(reversed(@))[0]", "self", "iter([{}])"),
    "__round__": ("round(@)", "self", "{}"),
    "__abs__": ("abs(@)", "self", "{}"),
    "__divmod__": ("divmod(@, 2)[0]", "self, o", "({}, 1)"),
    "__pow__": ("@ ** 2", "self, o", "{}"),
    "__length_hint__": ("operator.length_hint(@)", "self", "{}"),
    "__dir__": ("len(dir(@))", "self", "['x%d' % i for i in range({})]"),
    "__sizeof__": ("@.__sizeof__()", "self", "{}"),
}
# The same of a class whose metaclass has them.
OF_METACLASSES = {
    **{name: entry for name, entry in METHODS.items() if name != "__sizeof__"},
    "__bool__": ("(2.0 if @ else 3.0)", "self", "{} == 3"),
    "__instancecheck__": ("(2.0 if isinstance(1, @) else 3.0)", "self, o", "{} == 3"),
    "__subclasscheck__": ("(2.0 if issubclass(int, (str, @)) else 3.0)", "self, o", "{} == 3"),
}
BESIDE = """
import operator
def iadd(a):
    a += 1
    return a
def entered(a):
    with a as v: return v
"""


def special(name: str, read: str, parameters: str, result: str, bases: str = "", made: str = "()") -> Kind:
    """bases: of the class that is given the method; made: how an object of the class is made."""
    method = f"lambda {parameters}: {result.format('$')}"
    extra = ", '__exit__': lambda self, *e: None" if name == "__enter__" else ""
    return Kind(
        f"type('G', ({bases}), {{'{name}': {method}{extra}}}){made}",
        read,
        f"type(@).{name} = {method}",
        BESIDE,
    )


# fmt: off
KINDS: dict[str, Kind] = {
    **{f"{name} of a class": special(name, *entry) for name, entry in METHODS.items()},
    **{
        f"{name} of a metaclass": special(name, *entry, "type,", "('C', (), {})")
        for name, entry in OF_METACLASSES.items()
    },
    "__bool__ of a module": special("__bool__", *OF_METACLASSES["__bool__"], "types.ModuleType,", "('m')"),
    "code that is no function's": Kind(
        "types.FunctionType(compile('v = v', '', 'exec'), {'v': $})",
        "(@(), @.__globals__['v'])[1]",
        "types.FunctionType(compile('v = $', '', 'exec'), @.__globals__)()",
    ),
    "expression compiled": Kind(
        "types.FunctionType(compile('v', '', 'eval'), {'v': $})", "@()", "@.__globals__['v'] = $"
    ),
    "class of a class": Kind("METAS[$]('C', (), {})", "@.v", "@.__class__ = METAS[$]", """
METAS = {n: type("M", (type,), {"v": n}) for n in (2, 3, 5, 7)}
"""),
    "method of a base": Kind("derived($)", "@.v()", "type(@).__mro__[1].v = lambda self: $", GIVEN),
    "method over a base's": Kind("derived($)", "@.v()", "type(@).v = lambda self: $", GIVEN),
    "__init__ of a class": Kind(
        "type('I', (), {'__init__': lambda self: setattr(self, 'v', $)})",
        "@().v",
        "@.__init__ = lambda self: setattr(self, 'v', $)",
    ),
    "__new__ of a class": Kind(
        "type('N', (), {'__new__': lambda cls: types.SimpleNamespace(v=$)})",
        "@().v",
        "@.__new__ = lambda cls: types.SimpleNamespace(v=$)",
    ),
    "__subclasses__": Kind(
        "type('S', (), {'kept': []})",
        "len(@.__subclasses__()) + 1",
        "@.kept.append(type('T$', (@,), {}))",
    ),
    "__subclasshook__": Kind(
        "hooked_class($)",
        "(2.0 if issubclass(int, @) else 3.0)",
        "@.yes = $ == 3; abc.ABC.register(type('X', (), {}))",
        """
import abc
def hooked_class(v):
    class H(abc.ABC):
        yes = v == 3
        @classmethod
        def __subclasshook__(cls, other): return cls.yes
    return H
""",
    ),
    "__instancecheck__": Kind("checking($)", "(2.0 if isinstance(1, @) else 3.0)", "@.held = $", """
class Checks(type):
    def __instancecheck__(cls, obj): return cls.held == 3
def checking(v): return Checks('C', (), {'held': v})
"""),
    "__class_getitem__": Kind("classed($)", "@[1]", "@.held = $", """
def classed(v):
    class C:
        held = v
        def __class_getitem__(cls, i): return cls.held
    return C
"""),
    "descriptor's dict": Kind("kept($)", "@.v", "type(@).__dict__['v'].by[@] = $", """
class ByObject:
    def __init__(self): self.by = {}
    def __get__(self, obj, cls=None): return self.by[obj]
def kept(v):
    d = ByObject()
    o = type('O', (), {'v': d})()
    d.by[o] = v
    return o
"""),
    "identity": Kind(
        "types.SimpleNamespace(a=O, b=P)",
        "(2.0 if @.a is @.b else 3.0)",
        "@.b = O if $ == 3 else P",
        "O, P = object(), object()\n",
    ),
    "tied weights": Kind(
        "types.SimpleNamespace(a=W, b=V)",
        "(2.0 if @.a is @.b else 3.0)",
        "@.b = W if $ == 3 else V",
        "W, V = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))\n",
    ),
    "object in a list": Kind(
        "[O, P]",
        "(2.0 if O in @ else 3.0)",
        "@[:] = [O, P] if $ == 3 else [P]",
        "O, P = [1], [2]\n",
    ),
    "weakref's death": Kind("dying($)", "(2.0 if @.r() is None else 3.0)", "@.kept = None if $ == 3 else @.kept",
    CLASSES + """
def dying(v):
    k = Plain(v)
    return types.SimpleNamespace(kept=k, r=weakref.ref(k))
"""),
    "WeakSet": Kind(
        "types.SimpleNamespace(w=weakref.WeakSet(), kept=[])",
        "len(@.w) + 1",
        "@.kept.append(Plain($)); @.w.add(@.kept[-1])",
        CLASSES,
    ),
    "finalizer": Kind("ended($)", "(2.0 if @.f.alive else 3.0)", "@.f.detach()", CLASSES + """
def ended(v):
    k = Plain(v)
    return types.SimpleNamespace(k=k, f=weakref.finalize(k, id, 1))
"""),
    "exception notes": Kind("ValueError($)", "len(getattr(@, '__notes__', ())) + 1", "@.add_note('x')"),
    "exception cause": Kind("ValueError($)", "(2.0 if @.__cause__ is None else 3.0)", "@.__cause__ = ValueError($)"),
    "generator state": Kind("looped($)", "len(inspect.getgeneratorstate(@))", "next(@, None)", """import inspect
def looped(v): yield v
"""),
    "__length_hint__ of an iterator": Kind(
        "iter([1] * 200)",
        "operator.length_hint(@)",
        "next(@)",
        "import operator\n",
    ),
    "__setstate__ of an iterator": Kind(
        "iter(list(range(100)))",
        "@.__reduce__()[2]",
        "@.__setstate__($)",
    ),
    "list under an iterator": Kind("over($)", "sum(@.i)", "@.l.append($); @.i = iter(@.l)", """
def over(v):
    l = [v]
    return types.SimpleNamespace(l=l, i=iter(l))
"""),
    "thread's attribute": Kind(
        "setattr(threading.current_thread(), 'v', $)",
        "threading.current_thread().v",
        "threading.current_thread().v = $",
        "",
        "del threading.current_thread().v",
    ),
    "thread's name": Kind(
        "setattr(threading.current_thread(), 'name', 'x' * $)",
        "len(threading.current_thread().name)",
        "threading.current_thread().name = 'x' * $",
        "NAME = threading.current_thread().name\n",
        "threading.current_thread().name = NAME",
    ),
    "copied context": Kind("context($)", "@.c.run(CV2.get)", "@.c.run(CV2.set, $)", """
CV2 = contextvars.ContextVar("CV2")
def context(v):
    c = contextvars.copy_context()
    c.run(CV2.set, v)
    return types.SimpleNamespace(c=c)
"""),
    "random.getstate": Kind("random.seed($)", "random.random() + 1", "random.setstate(RSTATES[$])", """
RSTATES = {}
for n in (2, 3, 5, 7):
    random.seed(n)
    RSTATES[n] = random.getstate()
""", "random.seed(0)"),
    "logging.disable": Kind(
        "logging.disable(0)",
        "(2.0 if logging.getLogger('mb1').isEnabledFor(30) else 3.0)",
        "logging.disable(50 if $ == 3 else 0)",
        "",
        "logging.disable(0)",
    ),
    "logging's parent level": Kind(
        "logging.getLogger('mb2').setLevel(10 * $)",
        "logging.getLogger('mb2.child').getEffectiveLevel() / 10",
        "logging.getLogger('mb2').setLevel(10 * $)",
    ),
    "logger's handlers": Kind(
        "logging.getLogger('mb3').handlers.clear()",
        "len(logging.getLogger('mb3').handlers) + 1",
        "logging.getLogger('mb3').addHandler(logging.NullHandler())",
        "",
        "logging.getLogger('mb3').handlers.clear()",
    ),
    "logger's propagation": Kind(
        "setattr(logging.getLogger('mb4'), 'propagate', True)",
        "(2.0 if logging.getLogger('mb4').propagate else 3.0)",
        "logging.getLogger('mb4').propagate = $ == 3",
    ),
    "excepthook": Kind(
        "setattr(sys, 'excepthook', HOOK)",
        "(2.0 if sys.excepthook is HOOK else 3.0)",
        "sys.excepthook = HOOK if $ == 3 else print",
        "HOOK = sys.excepthook\n",
        "sys.excepthook = HOOK",
    ),
    "clock replaced": Kind(
        "setattr(time, 'time', lambda: $)",
        "time.time()",
        "time.time = lambda: $",
        "import time\nTIME = time.time\n",
        "time.time = TIME",
    ),
    "mocked": Kind(
        "types.SimpleNamespace(v=$)",
        "@.v",
        "mock.patch.object(@, 'v', $).start()",
        "from unittest import mock\n",
    ),
    "umask": Kind("os.umask(2)", "os.umask(os.umask(0)) + 1", "os.umask($)", "KEPT = os.umask(2)\n", "os.umask(KEPT)"),
    "environment removed": Kind(
        "os.environ.pop('MBX', None) and None",
        "(2.0 if 'MBX' in os.environ else 3.0)",
        "os.environ.update({'MBX': 'a'}) if $ == 3 else os.environ.pop('MBX', None)",
        "",
        "os.environ.pop('MBX', None)",
    ),
    "environment in bytes": Kind(
        "os.environ.pop('MBX', None) and None",
        "int(os.environb.get(b'MBX', b'4'))",
        "os.environ['MBX'] = '$'",
        "",
        "os.environ.pop('MBX', None)",
    ),
    "module reloaded": Kind(
        "setattr(sys.modules.setdefault('mbm', types.ModuleType('mbm')), 'v', $)",
        "imported()",
        "sys.modules['mbm'] = M($)",
        """
def M(v):
    m = types.ModuleType('mbm')
    m.v = v
    return m
def imported():
    from mbm import v
    return v
""",
        "sys.modules.pop('mbm', None)",
    ),
    "numpy dtype": Kind(
        "types.SimpleNamespace(a=numpy.ones(2))",
        "@.a.itemsize",
        "@.a = numpy.ones(2, 'float32' if $ == 3 else 'float64')",
    ),
    "numpy shape": Kind("numpy.ones(4)", "@.ndim", "@.shape = (2, 2) if $ == 3 else (1, 2, 2)"),
    "numpy writeable": Kind("numpy.ones(4)", "(2.0 if @.flags.writeable else 3.0)", "@.flags.writeable = $ == 3"),
    "numpy strides": Kind(
        "types.SimpleNamespace(a=numpy.ones((2, 2)))",
        "@.a.strides[0] / 8",
        "@.a = @.a.T if $ == 3 else numpy.ones((2, $))",
    ),
    "numpy structured": Kind("numpy.zeros(1, [('v', int)])", "int(@['v'][0]) + 1", "@['v'] = $"),
    "numpy ufunc out": Kind("numpy.full(1, $)", "float(@[0])", "numpy.add(@, 1, out=@)"),
    "numpy put": Kind("numpy.full(2, $)", "float(@[0])", "numpy.put(@, [0], [$])"),
    "numpy sort": Kind("numpy.array([5, 3, 2])", "float(@[0])", "@.sort()"),
    "numpy fill": Kind("numpy.full(2, $)", "float(@.sum())", "@.fill($)"),
    # of torch
    "tensor's class": Kind("torch.ones(())", "(2.0 if type(@) is torch.Tensor else 3.0)", "@.__class__ = Sub", """
class Sub(torch.Tensor): pass
"""),
    "module's class": Kind("classed_layer($)", "@(torch.ones(()))", "@.__class__ = LAYERS[$]", TENSORS + """
LAYERS = {n: type(f'L{n}', (torch.nn.Module,), {'forward': lambda self, x, n=n: x * n}) for n in (2, 3, 5, 7)}
def classed_layer(v): return LAYERS[v]()
"""),
    "forward in __dict__": Kind(
        "torch.nn.Identity()",
        "@(torch.ones(()))",
        "@.__dict__['forward'] = lambda x: x * $",
    ),
    "buffer popped": Kind("buffered2($)", "len(@._buffers) + 1", "@._buffers.pop('b', None)", """
def buffered2(v):
    m = torch.nn.Module()
    m.register_buffer('b', torch.ones(()))
    return m
"""),
    "children": Kind("torch.nn.Sequential()", "len(list(@.children())) + 1", "@.append(torch.nn.Identity())"),
    "modules of a list": Kind(
        "torch.nn.ModuleList([torch.nn.Identity()])",
        "sum(1 for _ in @.modules())",
        "@.append(torch.nn.Identity())",
    ),
    "a child's mode": Kind(
        "torch.nn.Sequential(torch.nn.Dropout(0.0))",
        "(2.0 if @[0].training else 3.0)",
        "@.train($ == 3)",
    ),
    "dropout's p": Kind("torch.nn.Dropout(0.0)", "@.p + @(torch.ones(()))", "@.p = 0.0 if $ == 3 else 1.0"),
    "is_leaf": Kind(
        "torch.ones(())",
        "(2.0 if @.is_leaf else 3.0)",
        "@.mul_(torch.ones((), requires_grad=True))",
    ),
    "resize_": Kind("torch.ones(9)", "@.shape[0]", "@.resize_($)"),
    "as_strided_": Kind("torch.ones(9)", "@.stride()[0]", "@.as_strided_((1,), ($,))"),
    "swap_tensors": Kind(
        "torch.full((), float($))",
        "@ * 1",
        "torch.utils.swap_tensors(@, torch.full((), float($)))",
    ),
    "out=": Kind("torch.full((1,), float($))", "@[0]", "torch.add(torch.full((1,), float($)), 0, out=@)"),
    "zero_": Kind("torch.full((1,), float($))", "@[0] + 1", "@.zero_()"),
    "index_put_": Kind(
        "torch.full((2,), float($))",
        "@[0]",
        "@.index_put_((torch.tensor([0]),), torch.tensor(float($)))",
    ),
    "set item by mask": Kind("torch.full((2,), float($))", "@[0]", "@[@ > 1] = $"),
    "augmented": Kind("types.SimpleNamespace(t=torch.full((), float($)))", "@.t", "@.t += 1"),
    "grad shared": Kind("both($)", "@.p.grad", "@.q.grad.fill_($)", TENSORS + """
def both(v):
    p, q = parameter(1), parameter(1)
    p.grad = q.grad = torch.full((), float(v))
    return types.SimpleNamespace(p=p, q=q)
"""),
    "grad of another dtype": Kind(
        "parameter($)",
        "(1.0 if @.grad is None else @.grad.double())",
        "@.grad = torch.full((), float($))",
        TENSORS,
    ),
    "detached alias": Kind("aliased($)", "@.p.detach()", "@.d.fill_($)", TENSORS + """
def aliased(v):
    p = parameter(v)
    return types.SimpleNamespace(p=p, d=p.detach())
"""),
    ".data alias": Kind("parameter($)", "@.detach()", "@.data.fill_($)", TENSORS),
    "_version through a view": Kind("torch.ones(2)", "@._version + 1", "@[:1].fill_($)"),
    "state of a tensor's subclass": Kind("wrapped($)", "@.by * 1", "@.by = $", """
class W(torch.Tensor):
    @staticmethod
    def __new__(cls, v):
        self = torch.ones(()).as_subclass(cls)
        self.by = v
        return self
def wrapped(v): return W(v)
"""),
    "__torch_function__ reads": Kind("functioned($)", "(torch.ones(()) * @.t).as_subclass(torch.Tensor)",
    "@.t.by = $", """
class W2(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = [a for a in args if isinstance(a, W2)]
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            return out * found[0].by if found and func is torch.Tensor.mul else out
def functioned(v):
    t = torch.ones(()).as_subclass(W2)
    t.by = v
    return types.SimpleNamespace(t=t)
"""),
    "function mode": Kind("types.SimpleNamespace(mode=Times($))", "under(@)", "@.mode.by = $", """
from torch.overrides import TorchFunctionMode
class Times(TorchFunctionMode):
    def __init__(self, by):
        super().__init__()
        self.by = by
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) * self.by
def under(s):
    with s.mode: return torch.sin(torch.ones(()))
"""),
    "param_groups replaced": Kind("opt2($)", "@.param_groups[0]['lr']",
    "@.param_groups = [{**@.param_groups[0], 'lr': $}]", """
def opt2(v): return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=v)
"""),
    "optimizer loaded": Kind(
        "opt2($)",
        "@.param_groups[0]['lr']",
        "@.load_state_dict(opt2($).state_dict())",
        "def opt2(v): return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=v)\n",
    ),
    "optimizer hooks": Kind(
        "opt2($)",
        "len(@._optimizer_step_pre_hooks) + 1",
        "@.register_step_pre_hook(lambda *a: None)",
        "def opt2(v): return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=v)\n",
    ),
    "warn always": Kind(
        "torch.set_warn_always(False)",
        "(2.0 if torch.is_warn_always_enabled() else 3.0)",
        "torch.set_warn_always($ == 3)",
        "",
        "torch.set_warn_always(False)",
    ),
    "warn only": Kind(
        "torch.use_deterministic_algorithms(False)",
        "(2.0 if torch.is_deterministic_algorithms_warn_only_enabled() else 3.0)",
        "torch.use_deterministic_algorithms($ == 3, warn_only=$ == 3)",
        "",
        "torch.use_deterministic_algorithms(False)",
    ),
    "debug mode": Kind(
        "torch.set_deterministic_debug_mode(0)",
        "torch.get_deterministic_debug_mode() + 1",
        "torch.set_deterministic_debug_mode(1 if $ == 3 else 0)",
        "",
        "torch.set_deterministic_debug_mode(0)",
    ),
    "tf32": Kind(
        "setattr(torch.backends.cuda.matmul, 'allow_tf32', False)",
        "(2.0 if torch.backends.cuda.matmul.allow_tf32 else 3.0)",
        "torch.backends.cuda.matmul.allow_tf32 = $ == 3",
        "",
        "torch.backends.cuda.matmul.allow_tf32 = False",
    ),
    "cudnn deterministic": Kind(
        "setattr(torch.backends.cudnn, 'deterministic', False)",
        "(2.0 if torch.backends.cudnn.deterministic else 3.0)",
        "torch.backends.cudnn.deterministic = $ == 3",
        "",
        "torch.backends.cudnn.deterministic = False",
    ),
    "sparse invariants": Kind(
        "torch.sparse.check_sparse_tensor_invariants.disable()",
        "(2.0 if torch.sparse.check_sparse_tensor_invariants.is_enabled() else 3.0)",
        "torch.sparse.check_sparse_tensor_invariants.enable() if $ == 3 else"
        " torch.sparse.check_sparse_tensor_invariants.disable()",
        "",
        "torch.sparse.check_sparse_tensor_invariants.disable()",
    ),
    "overwrites on conversion": Kind(
        "torch.__future__.set_overwrite_module_params_on_conversion(False)",
        "(2.0 if torch.__future__.get_overwrite_module_params_on_conversion() else 3.0)",
        "torch.__future__.set_overwrite_module_params_on_conversion($ == 3)",
        "",
        "torch.__future__.set_overwrite_module_params_on_conversion(False)",
    ),
    "inference tensor": Kind("[torch.ones(())]", "(2.0 if @[0].is_inference() else 3.0)", "@[0] = made_in($)", """
def made_in(v):
    with torch.inference_mode(v == 3): return torch.ones(())
"""),
    "parametrization added": Kind(
        "plain_layer($)",
        "@.w.detach()",
        "torch.nn.utils.parametrize.register_parametrization(@, 'w', Scaled($))",
        TENSORS + """
class Scaled(torch.nn.Module):
    def __init__(self, v):
        super().__init__()
        self.v = v
    def forward(self, x): return x * self.v
def plain_layer(v): return layer_of(w=parameter(v))
""",
    ),
    "module's state by load": Kind(
        "layer_of(w=parameter($))",
        "@.w.detach()",
        "@.load_state_dict({'w': torch.full((), float($))}, assign=True)",
        TENSORS,
    ),
    "registration hook": Kind(
        "None",
        "len(torch.nn.modules.module._global_parameter_registration_hooks) + 1",
        "REG.append(torch.nn.modules.module.register_module_parameter_registration_hook(lambda *a: None))",
        "REG = []\n",
        "[r.remove() for r in REG]",
    ),
}
# fmt: on
