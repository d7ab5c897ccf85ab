"""C callables: which are methods, and of what; as bindings make them, and as torch has them in this or that version."""

import builtins
import collections
import ctypes
import functools
import io
import itertools
import math
import operator
import random
import re
import sys
import types

import pytest
import torch

from moebius import capture, disable, explain, stats
from moebius.bytecode.c_callables import bound, hidden_maker, is_c_callable, maker_of, owner_of

PATTERN = re.compile("(a)b*")
OBJECTS = [
    [1, 2], {1: 2}, {1}, frozenset({1}), (1,), "text", b"bytes", bytearray(b"b"), 1, 1.5, 2j, range(3), iter([1]), ...,
    PATTERN, PATTERN.match("ab"), random.Random(1), collections.deque([1]), collections.OrderedDict(a=1), iter({}),
    torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.device("cpu"), torch.float32, torch.Size([1]),
    ValueError("text"), itertools.count(), operator.itemgetter(1), functools.partial(len), property(), object(), math,
]  # fmt: skip
CLASSES = [type(one) for one in OBJECTS] + [type, enumerate, torch.autograd.Function, torch._C._FunctionBase]


class MethodDef(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("call", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]


KEPT = []  # C code holds no reference to what it is made of
MANY, NAMED = 0x0001, 0x0002


def method_def(name, function):
    """How C says that it has a function: ``function(self, args, kwargs)``."""
    call = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_void_p)(
        lambda owner, args, kwargs: function(owner, args, ctypes.cast(kwargs, ctypes.py_object).value if kwargs else {})
    )
    made = MethodDef(name.encode(), ctypes.cast(call, ctypes.c_void_p), MANY | NAMED, None)
    KEPT.extend((call, made))
    return ctypes.byref(made)


def c_function(name, owner, module=None, function=lambda owner, args, kwargs: args):
    """A builtin function with this in its ``__self__``, as a binding makes one."""
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.py_object]
    return make(method_def(name, function), owner, module)


def c_class_method(cls, name, function):
    """A class's method in C, not yet put into the class."""
    make = ctypes.pythonapi.PyDescr_NewClassMethod
    make.restype, make.argtypes = ctypes.py_object, [ctypes.py_object, ctypes.c_void_p]
    return make(cls, method_def(name, function))


@pytest.mark.parametrize("owner", OBJECTS, ids=lambda one: type(one).__name__)
def test_every_method_in_c_of_an_object_is_its(owner):
    seen = 0
    for name in {name for base in type(owner).__mro__ for name in vars(base)}:
        for base in type(owner).__mro__:
            entry = vars(base).get(name)
            if type(entry) not in (types.MethodDescriptorType, types.WrapperDescriptorType):
                continue
            method = bound(entry, owner)
            if name == "__class_getitem__" or not is_c_callable(method):
                continue
            seen += 1
            assert owner_of(method) is owner
            assert bound(maker_of(method), owner) == method
            shown = next(vars(place)[name] for place in type(owner).__mro__ if name in vars(place))
            if (hidden := hidden_maker(method)) is None:  # the name gives it, then
                assert maker_of(method) is shown
            else:
                assert hidden is not shown and bound(hidden, owner) == method
    assert seen > 10


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)
def test_every_method_in_c_of_a_class_is_its(cls):
    for name in {name for base in cls.__mro__ for name in vars(base)}:
        for base in cls.__mro__:
            entry = vars(base).get(name)
            if type(entry) is types.ClassMethodDescriptorType:
                method = bound(entry, cls)
                assert owner_of(method) is cls and bound(maker_of(method), cls) == method
    assert owner_of(object.__new__) is object


def test_functions_of_modules_belong_to_nobody():
    """Of every module that is loaded: what is found there is a function, or what its owner's class makes."""
    count = 0
    for module in [one for one in sys.modules.values() if isinstance(one, types.ModuleType)]:
        for found in list(vars(module).values()):
            if is_c_callable(found):
                count += 1
                owner = owner_of(found)
                assert owner is None or hasattr(type(owner), found.__name__) or isinstance(owner, type)
    assert count > 1000 and owner_of(math.sqrt) is owner_of(builtins.len) is None


def test_functions_of_torchs_bindings_belong_to_nobody():
    """pybind11 keeps a record of its own in ``__self__``, whatever that is called in this version."""
    foreign = [
        found for found in vars(torch._C).values()
        if isinstance(found, types.BuiltinFunctionType)
        and not isinstance(found.__self__, types.ModuleType | types.NoneType | type)
    ]  # fmt: skip
    assert len(foreign) > 100 and torch._C._get_tracing_state in foreign
    assert all(owner_of(found) is None for found in foreign)


@pytest.mark.parametrize("owner", OBJECTS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("name", ["of_nobody", "append", "__repr__", "__eq__", "match", "add", "__new__"])
def test_a_function_with_an_object_of_its_binding_is_no_method(owner, name):
    """Even where that object's class has another method of this name."""
    function = c_function(name, owner)
    assert function.__self__ is owner and owner_of(function) is None and maker_of(function) is None


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


class Shown(Cube):
    @classmethod
    def apply(cls, x):
        return super().apply(x) * 2


class Holder:
    function = Cube.apply


def uses():
    apply = Cube.apply
    holder = types.SimpleNamespace(function=Cube.apply)
    return {
        "called": lambda x: Cube.apply(x),
        "kept in a cell": lambda x: apply(x),
        "kept in an object": lambda x: holder.function(x),
        "asked by name": lambda x: getattr(Cube, "apply")(x),  # noqa: B009
        "partial": lambda x: functools.partial(Cube.apply, x)(),
        "mapped": lambda x: next(map(Cube.apply, [x])),
        "super": lambda x: Shown.apply(x),
        "made in the step": lambda x: type("Own", (Cube,), {}).apply(x),
        "two": lambda x: apply(Cube.apply(x)),
    }


@pytest.mark.parametrize("how", uses())
@pytest.mark.parametrize("kind", ["as it is", "in C"])
def test_apply_of_an_autograd_function_in_python_or_in_c(how, kind, monkeypatch):
    """torch had it in Python until 2.13, and has it in C since."""
    if kind == "in C":
        own = torch.autograd.Function.__dict__["apply"]
        in_c = c_class_method(
            torch._C._FunctionBase, "apply", lambda cls, args, kwargs: own.__get__(None, cls)(*args, **kwargs)
        )
        monkeypatch.setattr(torch.autograd.Function, "apply", in_c)
        assert type(Cube.apply) is types.BuiltinMethodType and Cube.apply.__self__ is Cube
    use = uses()[how]
    plain, captured = torch.tensor([1.5, -2.0], requires_grad=True), torch.tensor([1.5, -2.0], requires_grad=True)
    expected = use(plain)
    expected.sum().backward()

    def step(x):
        y = use(x)
        y.sum().backward()
        return y

    report = explain(step)(captured)
    assert torch.equal(report.result, expected) and torch.equal(captured.grad, plain.grad)
    if how != "made in the step":
        assert (len(report.graphs), report.breaks) == (1, [])


def test_what_a_modules_call_asks_is_no_graph_break():
    """``torch._C._is_tracing`` and its like: functions of a binding, which are known to read one switch."""

    def step(x):
        return x + 1 if not torch._C._is_tracing() and torch._C._get_tracing_state() is None else x

    report = explain(step)(torch.zeros(2))
    assert (len(report.graphs), report.breaks) == (1, []) and torch.equal(report.result, torch.ones(2))


def test_an_unknown_function_of_a_binding_is_named_by_its_module():
    report = explain(lambda x: (torch._C._get_cpu_capability(), x + 1)[1])(torch.zeros(2))
    assert [each.detail.partition(" ")[0].endswith("._get_cpu_capability") for each in report.breaks] == [True]
    assert torch.equal(report.result, torch.ones(2))


def test_a_method_that_knows_its_class_called_by_the_class_or_held_over_a_break():
    def of_the_class(x):
        return x + len(re.Pattern.match(PATTERN, "abb").group())

    def held(x):
        match = PATTERN.match
        torch._C._get_cpu_capability()
        return x + len(match("abb").group())

    for step in (of_the_class, held):
        assert torch.equal(explain(step)(torch.zeros(2)).result, torch.full((2,), 3.0))


OWN_LOOKUP = {
    "list": (list, "append", (1,)), "dict": (dict, "setdefault", (1, 2)), "set": (set, "add", (1,)),
    "deque": (collections.deque, "append", (1,)), "text": (io.StringIO, "write", ("a",)),
    "random": (random.Random, "random", ()), "str": (str, "upper", ()),
}  # fmt: skip


@pytest.mark.parametrize("kind", OWN_LOOKUP)
def test_a_lookup_in_python_is_asked_once_around_a_break(kind):
    base, name, args = OWN_LOOKUP[kind]
    asked = []

    class Own(base):
        def __getattribute__(self, attribute):
            asked.append(attribute)
            return super().__getattribute__(attribute)

    def step(obj, x):
        method = getattr(obj, name)
        aside()
        method(*args)
        return x * 2

    aside = disable(lambda: None)
    counts, captured = [], capture(step)
    for function in (step, captured, captured):
        obj = Own()
        asked.clear()
        function(obj, torch.ones(2))
        counts.append(asked.count(name))
    assert counts == [1, 1, 1] and stats(captured).breaks
