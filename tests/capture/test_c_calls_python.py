"""C code that runs a user's Python: operators of torch, builtins and methods given objects with special methods.

Each special method × each use × where the object comes from. The method notes that it ran: as often, in as many calls,
as in plain Python, with the same results and the same errors.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from seeds import some

import moebius
from moebius import capture


def with_method(name: str, value: Callable[..., Any]) -> type:
    """A class with one special method, which notes in the object's ``log`` that it ran."""

    class Kind:
        def __init__(self, log: list[str], x: torch.Tensor):
            self.log, self.x = log, x

    def method(self: Any, *args: Any) -> Any:
        self.log.append(name)
        return value(self, *args)

    setattr(Kind, name, method)
    return Kind


def missing(_: Any, name: str) -> int:
    if name.startswith("__"):
        raise AttributeError(name)
    return 1


class Overriding:
    """Which answers for torch's operators, and notes which."""

    def __init__(self, log: list[str], x: torch.Tensor):
        self.log, self.x = log, x

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            if isinstance(value, Overriding):
                value.log.append(function.__name__)
                return value.x
            return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value

        return function(*map(plain, args), **{key: plain(value) for key, value in (kwargs or {}).items()})


class Further(Overriding):
    """A subclass, which torch asks first."""


class OtherClass:
    """Which answers for its class, as a proxy or a mock does."""

    def __init__(self, log: list[str], x: torch.Tensor):
        self.log, self.x = log, x

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        self.log.append("__class__")
        return dict


METHODS: dict[str, Callable[..., Any]] = {
    "__index__": lambda s: 1,
    "__int__": lambda s: 1,
    "__float__": lambda s: 1.5,
    "__bool__": lambda s: True,
    "__len__": lambda s: 2,
    "__iter__": lambda s: iter([1, 2]),
    "__array__": lambda s, *a: np.ones(2, dtype=np.float32),
    "__complex__": lambda s: 1j,
    "__hash__": lambda s: 5,
    "__eq__": lambda s, o: True,
    "__lt__": lambda s, o: True,
    "__contains__": lambda s, o: True,
    "__repr__": lambda s: "K",
    "__str__": lambda s: "K",
    "__format__": lambda s, f: "K",
    "__fspath__": lambda s: "/tmp",
    "__round__": lambda s, *a: 1,
    "__trunc__": lambda s: 1,
    "__floor__": lambda s: 1,
    "__abs__": lambda s: 1,
    "__neg__": lambda s: 1,
    "__call__": lambda s, *a: a[0] if a else 1,
    "__getattr__": missing,
    "__add__": lambda s, o: o,
    "__radd__": lambda s, o: o,
    "__mul__": lambda s, o: o,
    "__rmul__": lambda s, o: o,
    "__length_hint__": lambda s: 2,
    "__reversed__": lambda s: iter([2, 1]),
    "__next__": lambda s: 3,
    "__dir__": lambda s: ["a"],
    "__sizeof__": lambda s: 8,
    "__bytes__": lambda s: b"a",
    "__getitem__": lambda s, i: [1, 2][i],
    "__enter__": lambda s: s,
    "__divmod__": lambda s, o: (1, 2),
    "__pow__": lambda s, o, *a: o,
    "__missing__": lambda s, k: 1,
    "__array_ufunc__": lambda s, *a, **k: 7,
}
KINDS: dict[str, type] = {name: with_method(name, value) for name, value in METHODS.items()}
KINDS |= {"__torch_function__": Overriding, "__torch_function__ of a subclass": Further, "__class__": OtherClass}
# torch asks for the class before it says that they are not equal; capture says so without asking
UNASKED = {("__class__", text) for text in ("x == k", "k == x", "x.__eq__(k)", "x != k", "k != x")}
USES = """
torch.relu(k)
torch.add(x, k)
torch.add(k, x)
x + k
k + x
x * k
x.add(k)
x[k]
x[k, 0]
x[:k]
x.sum(k)
x.sum(dim=k)
torch.zeros(k)
torch.zeros(2, k)
torch.zeros((k,))
torch.full((2,), k)
torch.tensor(k)
torch.tensor([k, 1])
torch.as_tensor(k)
x.new_tensor(k)
torch.stack([x, k])
torch.cat((x, k))
torch.where(x > 0, x, k)
x.reshape(k, -1)
x.expand(k, 2)
x.view(k)
x.masked_fill(x > 0, k)
torch.clamp(x, k)
torch.arange(k)
x.to(k)
x == k
x < k
k < x
k == x
torch.nn.functional.relu(k)
torch.nn.functional.dropout(x, k)
torch.nn.functional.linear(x, k)
torch.nn.functional.pad(x, (k, 0))
torch.nn.functional.one_hot(torch.arange(2), k)
torch.split(x, k)
torch.topk(x, k)
torch.is_tensor(k)
torch.numel(k)
torch.allclose(x, k)
torch.autograd.grad(x.sum(), k)
torch.autograd.grad(k, x)
torch.equal(x, k)
torch.pow(x, k)
torch.pow(k, x)
x ** k
torch.nn.Parameter(k)
torch.from_numpy(k)
np.asarray(k)
np.mean(k)
np.add(k, 1)
torch.Size([k])
torch.device("cpu", k)
torch.manual_seed(k)
torch.einsum("ij->i", k)
torch.linspace(0, 1, k)
torch.broadcast_tensors(x, k)
torch.func.vmap(k)(x)
torch.utils.checkpoint.checkpoint(k, x, use_reentrant=False)
x.shape[k]
x.size(k)
x.stride(k)
x.dim() * k
x.transpose(k, 0)
x.unbind(k)
x.numpy()[k]
torch.ones(3)[[k, 0]]
torch.Size([2, 3])[k]
x.__getitem__(k)
x.__add__(k)
x.__eq__(k)
x.__mul__(k)
(x.clone().__iadd__(k))
x.clone().add_(k)
x.clone().fill_(k)
x.clone().__setitem__(0, k)
x.clone().__setitem__(k, 0)
x.clone().copy_(k)
torch.nn.functional.cross_entropy(x, k)
torch.nn.functional.layer_norm(x, (k,))
torch.nn.functional.softmax(x, k)
torch.nn.functional.normalize(x, k)
torch.nn.functional.gelu(x, approximate=k)
torch.nn.functional.interpolate(x[None, None], k)
torch.nn.init.normal_(x.clone(), k)
torch.nn.utils.clip_grad_norm_(k, 1.0)
torch.nn.Linear(2, k)
torch.nn.Sequential(k)
torch.nn.ModuleList(k)
torch.nn.ParameterList(k)
torch.optim.SGD(k, 0.1)
k.x
k @ x
x @ k
int(k)
float(k)
bool(k)
str(k)
repr(k)
len(k)
list(k)
tuple(k)
set(k)
{k: 1}
{k}
[k] == [k]
[k].index(k)
[1, k].count(1)
k in [1, 2]
1 in k
sorted([k, k])
max(k, k)
min([k, k])
sum([k, k])
sum([1], k)
any([k])
all([k, k])
f"{k}"
f"{k!r:>5}"
"%s" % k
"{}".format(k)
"%d" % k
format(k, "")
range(k)
list(range(k))
slice(k).indices(4)
[1, 2, 3][k]
(1, 2, 3)[k:]
"abc" * k
[0] * k
k * (1, 2)
[1].__mul__(k)
"ab".__mul__(k)
(lambda l: l.__imul__(k))([1, 2])
(lambda d: d.update(k))({})
{}.update([(k, 1)])
{}.setdefault(k, 1)
{1}.update([k])
{1}.union([k])
{1}.issuperset([k])
set([1]).__or__({k})
collections.deque([1]) * k
[1].insert(k, 2)
[1, 2].pop(k)
[1, 2, 3].index(3, k)
"abc".replace("a", "b", k)
"abc".zfill(k)
"abc".encode(k)
b"abc"[k]
range(4)[k]
memoryview(b"abc")[k]
itertools.islice(range(9), k)
list(itertools.combinations([1, 2, 3], k))
list(itertools.permutations([1, 2], k))
list(itertools.product([1, 2], repeat=k))
enumerate([1], k)
list(enumerate([1], k))
list(itertools.zip_longest([1], [], fillvalue=k))
list(itertools.compress([1], [k]))
list(itertools.takewhile(k, [1]))
list(itertools.takewhile(lambda a: k, [1, 2]))
list(itertools.dropwhile(k, [1, 2]))
list(itertools.dropwhile(lambda a: k, [1, 2]))
list(itertools.filterfalse(k, [1, 2]))
list(itertools.filterfalse(lambda a: k, [1, 2]))
list(itertools.filterfalse(None, [k, 0]))
list(filter(lambda a: k, [1, 2]))
list(itertools.compress([1, 2], (k, 0)))
list(itertools.compress(data=[1, 2], selectors=[k, k]))
list(itertools.combinations_with_replacement([1, 2], k))
list(map(lambda a: k, [1, 2]))
max([3, 1], key=lambda a: k)
sorted([3, 1], key=lambda a: k)
functools.reduce(lambda a, b: k, [1, 2])
any(k for _ in [1, 2])
list(itertools.starmap(k, [(1,)]))
list(itertools.groupby([1, 1], k))
list(itertools.groupby([k, k]))
list(itertools.count(k) and [])
list(zip(k, [1]))
k.log is None
~k
+k
k & 1
1 | k
k ** 2
2 ** k
k << 1
1 << k
k // 2
7 % k
k and 1
k or 1
not k
1 if k else 2
[i for i in k]
(lambda *a: a)(*k)
(lambda **a: a)(**k)
(lambda a, b: (a, b))(*k)
1 < k < 3
k != k
k is k
k in {k}
k in (k,)
k not in [1]
round(k)
abs(k)
-k
divmod(k, 2)
pow(k, 2)
complex(k)
bytes(k)
bytearray(k)
chr(k)
hex(k)
bin(k)
iter(k)
next(k)
reversed(k)
list(reversed(k))
enumerate(k)
list(zip(k, k))
list(map(k, [1, 2]))
list(filter(k, [1, 2]))
list(filter(None, [k]))
dict(k)
dict([(k, 1)])
dict.fromkeys(k)
dict.fromkeys([k])
[*k]
{**k}
",".join(k)
k.foo
getattr(k, "foo", 3)
hasattr(k, "foo")
vars(k)
callable(k)
isinstance(k, int)
operator.index(k)
operator.length_hint(k)
operator.add(k, 1)
operator.itemgetter(0)(k)
operator.attrgetter("foo")(k)
operator.methodcaller("foo")(k)
functools.reduce(k, [1, 2])
functools.partial(k, 1)()
list(itertools.chain(k, k))
list(itertools.islice([1, 2, 3], k))
list(itertools.repeat(1, k))
list(itertools.accumulate([1, 2], k))
collections.Counter(k)
collections.deque(k)
collections.deque([1], k)
collections.OrderedDict([(k, 1)])
collections.defaultdict(k)[1]
math.sqrt(k)
math.floor(k)
math.isclose(k, 1)
math.prod([k])
copy.copy(k)
os.fspath(k)
json.dumps({"a": k}, default=k)
bisect.bisect([1, 2], k)
heapq.heappush([k], k)
random.Random(k)
string.Template("$a").substitute(a=k)
textwrap.dedent(k)
statistics.mean([k])
fractions.Fraction(k)
decimal.Decimal(k)
struct.pack("i", k)
array.array("i", k)
array.array("i", [k])
types.SimpleNamespace(**k)
types.SimpleNamespace(a=k) == types.SimpleNamespace(a=k)
sys.getsizeof(k)
dir(k)
"abc".startswith(k)
"abc".find("c", k)
"abc".center(k)
"a,b".split(",", k)
(3).to_bytes(k, "big")
int("11", k)
[3, 1].sort(key=k)
sorted([3, 1], key=k)
max([3, 1], key=k)
sorted([k, 1])
(1, k) < (1, k)
(1, k) == (1, k)
{1: k} == {1: k}
{k: 1}[k]
{k: 1}.get(k)
{1, 2} | {k}
frozenset([k])
print(k, end="", file=io.StringIO())
exec("pass", {"k": k})
""".strip().splitlines()


def shown(value: Any) -> Any:
    """What a test compares: tensors by type and items, addresses left out."""
    if isinstance(value, torch.Tensor):
        return (type(value).__name__, value.dtype, tuple(value.shape), value.tolist())
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    if type(value) in (int, float, bool, type(None), complex, bytes):
        return value
    return re.sub("0x[0-9a-f]+", "0x", value) if type(value) is str else type(value).__name__


def outcome(use: Callable[..., Any], k: Any, x: torch.Tensor) -> Any:
    try:
        return use(k, x)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:60]}"


def results(kind: type, use: Callable[..., Any], made: bool, wrap: Callable[[Any], Any]) -> list[Any]:
    """Three calls of a step that uses an object which it makes, or is given."""

    def makes(x: torch.Tensor, log: list[str]) -> Any:
        return outcome(use, kind(log, x), x), x * 2

    def given(x: torch.Tensor, k: Any) -> Any:
        return outcome(use, k, x), x * 2

    step, found = wrap(makes if made else given), []
    for i in range(3):
        torch.manual_seed(0)
        x, log = torch.ones(2, 2) * (i + 1), []
        result = step(x, log if made else kind(log, x))
        found.append((shown(result), log))
    return found


@pytest.mark.share(16)
@pytest.mark.parametrize("name", KINDS)
def test_special_methods_run_as_often_as_in_plain_python(name: str) -> None:
    cases = list(itertools.product(USES, ("made", "given")))
    differ = []
    for text, where in cases if "MOEBIUS_WHOLE" in os.environ else some(cases, 24, of=name):
        if (name, text) in UNASKED:
            continue
        use = eval(f"lambda k, x: {text}")
        plain = results(KINDS[name], use, where == "made", lambda step: step)
        found = results(KINDS[name], use, where == "made", lambda step: capture(step, backend="eager"))
        if found != plain:
            differ.append((text, where, plain, found))
    assert not differ


@pytest.mark.parametrize("order", [(Overriding, Further), (Further, Overriding)])
def test_operators_that_a_class_answers_stand_in_the_graph(order: tuple[type, type]) -> None:
    def step(x: torch.Tensor) -> Any:
        log: list[str] = []
        one, other = (kind(log, x) for kind in order)
        return torch.add(torch.cat([one, x, other]), torch.sum(one, dim=0)), torch.nn.functional.relu(one), tuple(log)

    captured = capture(step, backend="eager")
    for i in range(3):
        x = torch.ones(2, 2) * i
        assert shown(captured(x)) == shown(step(x))
    assert (moebius.stats(captured).graphs, moebius.stats(captured).breaks) == (1, 0)


def test_an_answer_within_a_function_is_not_the_function_s_answer() -> None:
    def step(x: torch.Tensor) -> Any:
        log: list[str] = []
        try:
            return torch.nn.functional.normalize(x, p=Norm(log, x)), log
        except TypeError:
            return x, log

    class Norm(Overriding):
        @classmethod
        def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            args[1].log.append(function.__name__)
            return args[0].abs().sum(1, keepdim=True)

    x = torch.rand(2, 2)
    assert shown(capture(step, backend="eager")(x)) == shown(step(x))


def test_a_class_that_leaves_an_operator_to_the_next_one() -> None:
    class Declines(Overriding):
        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            return NotImplemented

    def step(x: torch.Tensor) -> Any:
        log: list[str] = []
        return torch.add(Declines(log, x), Overriding(log, x)), log

    x = torch.ones(2)
    assert shown(capture(step, backend="eager")(x)) == shown(step(x))
