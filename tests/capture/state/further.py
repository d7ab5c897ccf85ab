"""Further kinds of state (see ``kinds``): what classes, containers, functions and positions hold, and the process."""

from __future__ import annotations

from .kinds import CLASSES, FUNCTION, Kind

MORE_CLASSES = CLASSES + """
class Meta(type):
    @property
    def v(cls): return cls.__dict__["held"]
class Base2:
    def v(self): return 2
class Base3:
    def v(self): return 3
class Base5:
    def v(self): return 5
class Base7:
    def v(self): return 7
BASES = {2: Base2, 3: Base3, 5: Base5, 7: Base7}
def metaclassed(v): return Meta("M", (), {"held": v})
def rebased(v): return type("R", (BASES[v],), {})()
def static(v): return type("S", (), {"v": staticmethod(lambda: v)})
def klass(v): return type("K", (), {"v": classmethod(lambda cls: v)})
def propped(v): return type("P", (), {"v": property(lambda self: v)})()
def called(v): return type("C", (), {"__call__": lambda self: v})()
def added(v): return type("A", (), {"__add__": lambda self, o: v + o})()
def boolean(v): return type("B", (), {"__bool__": lambda self: v == 3})()
def lengthy(v): return type("L", (), {"__len__": lambda self: v})()
def contains(v): return type("Q", (), {"__contains__": lambda self, o: o == v})()
def iterated(v): return type("I", (), {"__iter__": lambda self: iter([v])})()
def hashed(v): return type("H", (), {"__eq__": lambda self, o: v == o, "__hash__": None})()
class Getter:
    v = 1
    def __init__(self, v): self.held = v
    def __getattribute__(self, name):
        if name == "v": return object.__getattribute__(self, "held")
        return object.__getattribute__(self, name)
class Setter:
    def __init__(self, v): object.__setattr__(self, "v", v)
    def __setattr__(self, name, v): object.__setattr__(self, name, v)
class SlotDict:
    __slots__ = ("a", "__dict__")
    def __init__(self, v): self.v = v
class SlotBase(Slot):
    __slots__ = ("w",)
class ListSub(list): pass
class DictSub(dict):
    def __missing__(self, key): return 3
class IntSub(int): pass
def intsub(v):
    i = IntSub(4)
    i.v = v
    return i
import abc, enum
class Color(enum.Enum):
    RED = 1
def registered():
    class Abc(abc.ABC): pass
    class Some: pass
    return types.SimpleNamespace(Abc=Abc, some=Some())
class Bag:
    def __init__(self, **kw): self.__dict__.update(kw)
"""

# fmt: off
KINDS: dict[str, Kind] = {
    "metaclass property": Kind("metaclassed($)", "@.v", "@.held = $", MORE_CLASSES),
    "bases": Kind("rebased($)", "@.v()", "type(@).__bases__ = (BASES[$],)", MORE_CLASSES),
    "staticmethod replaced": Kind("static($)", "@.v()", "@.v = staticmethod(lambda: $)", MORE_CLASSES),
    "classmethod replaced": Kind("klass($)", "@.v()", "@.v = classmethod(lambda cls: $)", MORE_CLASSES),
    "property replaced": Kind("propped($)", "@.v", "type(@).v = property(lambda self: $)", MORE_CLASSES),
    "class __call__": Kind("called($)", "@()", "type(@).__call__ = lambda self: $", MORE_CLASSES),
    "class __add__": Kind("added($)", "(@ + 1)", "type(@).__add__ = lambda self, o: $ + o", MORE_CLASSES),
    "class __bool__": Kind("boolean($)", "(2.0 if @ else 3.0)", "type(@).__bool__ = lambda self: $ == 3", MORE_CLASSES),
    "class __len__": Kind("lengthy($)", "len(@)", "type(@).__len__ = lambda self: $", MORE_CLASSES),
    "class __contains__": Kind(
        "contains($)",
        "(2.0 if 3 in @ else 3.0)",
        "type(@).__contains__ = lambda self, o: o == $",
        MORE_CLASSES,
    ),
    "class __iter__": Kind("iterated($)", "next(iter(@))", "type(@).__iter__ = lambda self: iter([$])", MORE_CLASSES),
    "class __eq__": Kind(
        "hashed($)",
        "(2.0 if @ == 3 else 3.0)",
        "type(@).__eq__ = lambda self, o: $ == o",
        MORE_CLASSES,
    ),
    "type.__setattr__": Kind("classy($)", "@.v", "type.__setattr__(@, 'v', $)", CLASSES),
    "class deleted": Kind("classy($)()", "getattr(@, 'v', 1)", """if hasattr(type(@), 'v'): del type(@).v
if $ != 3:
    type(@).v = $""", CLASSES),
    "__getattribute__": Kind("Getter($)", "@.v", "@.held = $", MORE_CLASSES),
    "__setattr__": Kind("Setter($)", "@.v", "@.v = $", MORE_CLASSES),
    "slots and dict": Kind("SlotDict($)", "@.v", "@.v = $", MORE_CLASSES),
    "slot of a base": Kind("SlotBase($)", "@.v", "@.v = $", MORE_CLASSES),
    "slot deleted": Kind("Slot($)", "getattr(@, 'v', 1)", """if hasattr(@, 'v'): del @.v
if $ != 3:
    @.v = $""", MORE_CLASSES),
    "descriptor that only sets": Kind("of_setter($)", "@.v", "@.v = $", """
class Setter:
    def __set__(self, obj, v): obj.__dict__["v"] = v
def of_setter(v):
    obj = type("C", (), {"v": Setter()})()
    obj.v = v
    return obj
"""),
    "slot by descriptor": Kind("Slot($)", "Slot.v.__get__(@)", "Slot.v.__set__(@, $)", MORE_CLASSES),
    "list subclass": Kind("ListSub([$])", "@[0]", "@[0] = $", MORE_CLASSES),
    "list subclass attribute": Kind("listsub($)", "@.v", "@.v = $", MORE_CLASSES + """
def listsub(v):
    r = ListSub([1])
    r.v = v
    return r
"""),
    "dict subclass": Kind("DictSub(v=$)", "@['v']", "@['v'] = $", MORE_CLASSES),
    "__missing__": Kind("DictSub()", "@['v']", """@.pop('v', None)
if $ != 3:
    @['v'] = $""", MORE_CLASSES),
    "int subclass attribute": Kind("intsub($)", "@.v", "@.v = $", MORE_CLASSES),
    "enum attribute": Kind("setattr(Color.RED, 'v', $)", "Color.RED.v", "Color.RED.v = $", MORE_CLASSES),
    "abc register": Kind(
        "registered()",
        "(2.0 if isinstance(@.some, @.Abc) else 3.0)",
        "@.Abc.register(type(@.some))",
        MORE_CLASSES,
    ),
    "object.__setattr__": Kind("Plain($)", "object.__getattribute__(@, 'v')", "object.__setattr__(@, 'v', $)", CLASSES),
    "__dict__ updated": Kind("Plain($)", "@.v", "vars(@).update(v=$)", CLASSES),
    "__dict__ cleared": Kind("Plain($)", "@.v", """@.__dict__.clear()
@.v = $""", CLASSES),
    "vars length": Kind("Plain($)", "len(vars(@))", "@.__dict__['k$'] = 1", CLASSES),
    "dir": Kind("Plain()", "(2.0 if 'w3' in dir(@) else 3.0)", "@.w$ = 1", CLASSES),
    "attrgetter": Kind("Plain($)", "GET(@)", "@.v = $", CLASSES + """import operator
GET = operator.attrgetter('v')
"""),
    "methodcaller": Kind("of($)", "GET(@)", "@.__class__ = BY[$]", CLASSES + """import operator
GET = operator.methodcaller('v')
"""),
    "itemgetter": Kind("[$]", "GET(@)", "@[0] = $", CLASSES + """import operator
GET = operator.itemgetter(0)
"""),
    "bound method's self": Kind("bound($)", "@.f()", "@.f.__self__.v = $", CLASSES + """
class Mb:
    def __init__(self, v): self.v = v
    def f(self): return self.v
def bound(v): return types.SimpleNamespace(f=Mb(v).f)
"""),
    "weakref": Kind("refd($)", "@.r().v", "@.kept.v = $", CLASSES + """
def refd(v):
    k = Plain(v)
    return types.SimpleNamespace(kept=k, r=weakref.ref(k))
"""),
    "proxy": Kind("proxied($)", "@.r.v", "@.kept.v = $", CLASSES + """
def proxied(v):
    k = Plain(v)
    return types.SimpleNamespace(kept=k, r=weakref.proxy(k))
"""),
    "proxy written": Kind("proxied($)", "@.kept.v", "@.r.v = $", CLASSES + """
def proxied(v):
    k = Plain(v)
    return types.SimpleNamespace(kept=k, r=weakref.proxy(k))
"""),
    "mapping proxy": Kind("shown($)", "@.p['v']", "@.d['v'] = $", """
def shown(v):
    d = {'v': v}
    return types.SimpleNamespace(d=d, p=types.MappingProxyType(d))
"""),
    "dict view": Kind("viewed($)", "sum(@.p)", "@.d['v'] = $", """
def viewed(v):
    d = {'v': v}
    return types.SimpleNamespace(d=d, p=d.values())
"""),
    "dict |=": Kind("{'v': $}", "@['v']", """t = @
t |= {'v': $}"""),
    "popitem": Kind("{'a': 2, 'v': $}", "list(@.values())[-1]", "@.popitem(); @['v'] = $"),
    "list +=": Kind("[$]", "@[-1]", """t = @
t += [$]"""),
    "list *=": Kind("[1] * $", "len(@)", """del @[:]
@.extend([1] * $)"""),
    "list sort": Kind("[$, 2, 3]", "@[0]", "@[:] = [$, 3, 2]; @.sort(key=lambda i: -i)"),
    "list reverse": Kind("[2, $]", "@[0]", "@.reverse()"),
    "list pop": Kind("[$] * 90", "len(@)", "@.pop()"),
    "list insert": Kind("[$]", "@[0]", "@.insert(0, $)"),
    "del slice": Kind("[1, $]", "@[-1]", "del @[1:]; @.append($)"),
    "heapq": Kind("[$]", "@[0]", "heapq.heapreplace(@, $)", "import heapq\n"),
    "bisect": Kind("[2]", "len(@)", "bisect.insort(@, $)", "import bisect\n"),
    "set -=": Kind("{2, $}", "len(@)", """t = @
t ^= {$, 11}"""),
    "set update": Kind("{1}", "len(@)", "@.update([$, 20 + $])"),
    "frozenset in list": Kind("[frozenset({$})]", "max(@[0])", "@[0] = frozenset({$})"),
    "deque rotate": Kind("collections.deque([$, 3, 2])", "@[0]", "@.rotate(1); @[0] = $"),
    "deque maxlen": Kind("collections.deque([2] * 3, 3)", "sum(@)", "@.append($)"),
    "deque left": Kind("collections.deque([$])", "@[0]", "@.appendleft($)"),
    "defaultdict missing": Kind("collections.defaultdict(list)", "len(@) + 1", "@[$].append(1)"),
    "default factory": Kind(
        "collections.defaultdict(lambda: $)",
        "@.default_factory()",
        "@.default_factory = lambda: $",
    ),
    "Counter most common": Kind("collections.Counter([$, $])", "@.most_common(1)[0][0]", "@.update([$] * 9 ** len(@))"),
    "Counter subtract": Kind("collections.Counter(v=$)", "@['v']", "@.subtract(v=1)"),
    "UserList": Kind("collections.UserList([$])", "@[0]", "@[0] = $"),
    "ChainMap child": Kind("collections.ChainMap({}, {'v': $})", "@['v']", "@.maps[1]['v'] = $; @.maps[0].pop('v', 0)"),
    "ctypes struct": Kind("CS($)", "@.v", "@.v = $", "class CS(ctypes.Structure): _fields_ = [('v', ctypes.c_int)]\n"),
    "struct pack_into": Kind(
        "bytearray(struct.pack('i', $))",
        "struct.unpack('i', @)[0]",
        "struct.pack_into('i', @, 0, $)",
        "import struct\n",
    ),
    "array append": Kind("array.array('i', [$])", "len(@)", "@.append($)"),
    "bytearray extend": Kind("bytearray(b'x' * $)", "len(@)", "@.extend(b'x' * $)"),
    "numpy view": Kind("nview($)", "int(@.a[0])", "@.b[...] = $", """
def nview(v):
    a = numpy.array([v, 1])
    return types.SimpleNamespace(a=a, b=a[:1])
"""),
    "numpy resize": Kind("[numpy.ones($)]", "@[0].shape[0]", "@[0] = numpy.ones($)"),
    "numpy of tensor": Kind("tn($)", "float(@.n[0])", "@.t.fill_($)", """
def tn(v):
    t = torch.full((1,), float(v))
    return types.SimpleNamespace(t=t, n=t.numpy())
"""),
    "tensor of numpy": Kind("tn($)", "@.t[0]", "@.n[0] = $", """
def tn(v):
    n = numpy.full((1,), float(v), 'float32')
    return types.SimpleNamespace(n=n, t=torch.from_numpy(n))
"""),
    "numpy Generator": Kind(
        "types.SimpleNamespace(g=numpy.random.default_rng($))",
        "float(@.g.random())",
        "@.g = numpy.random.default_rng($)",
    ),
    "numpy seterr": Kind(
        "numpy.seterr(all='warn') and None",
        "(2.0 if numpy.geterr()['over'] == 'ignore' else 3.0)",
        "numpy.seterr(over='ignore' if $ == 3 else 'warn')",
        "",
        "numpy.seterr(all='warn')",
    ),
    "numpy printoptions": Kind(
        "numpy.set_printoptions(precision=$)",
        "numpy.get_printoptions()['precision']",
        "numpy.set_printoptions(precision=$)",
        "",
        "numpy.set_printoptions(precision=8)",
    ),
    "BytesIO position": Kind("io.BytesIO(b'x' * 100)", "@.tell() + 1", "@.seek($)"),
    "file": Kind("opened($)", "@.tell() + 1", "@.seek($)", """import tempfile
def opened(v):
    f = tempfile.TemporaryFile()
    f.write(b'x' * 50)
    f.seek(v)
    return f
"""),
    "Event": Kind("threading.Event()", "(2.0 if @.is_set() else 3.0)", "@.set() if $ == 3 else @.clear()"),
    "Semaphore": Kind("threading.Semaphore($)", "@._value", "@.release()"),
    "RLock": Kind("threading.RLock()", "1 + @._is_owned()", "@.acquire()"),
    "Condition": Kind("threading.Condition()", "1 + @._is_owned()", "@.acquire()"),
    "Queue": Kind("queue.Queue()", "@.qsize() + 1", "@.put($)"),
    "PriorityQueue": Kind("pq($)", "@.queue[0]", "@.put(9 - $)", """
def pq(v):
    q = queue.PriorityQueue()
    q.put(v)
    return q
"""),
    "contextvar reset": Kind(
        "CV.set($) and None",
        "CV.get()",
        "CV.reset(CV.set(1)) or CV.set($)",
        'CV = contextvars.ContextVar("CV")\n',
    ),
    "contextvar default": Kind(
        "CVD.set($) and None",
        "CVD.get(4)",
        "CVD.set($)",
        'CVD = contextvars.ContextVar("CVD", default=9)\n',
    ),
    "gc threshold": Kind(
        "gc.set_threshold(700 + $)",
        "gc.get_threshold()[0] - 700",
        "gc.set_threshold(700 + $)",
        "",
        "gc.set_threshold(700)",
    ),
    "gc enabled": Kind(
        "gc.enable()",
        "(2.0 if gc.isenabled() else 3.0)",
        "gc.enable() if $ == 3 else gc.disable()",
        "",
        "gc.enable()",
    ),
    "switch interval": Kind(
        "sys.setswitchinterval(0.01 * $)",
        "sys.getswitchinterval() * 100",
        "sys.setswitchinterval(0.01 * $)",
        "",
        "sys.setswitchinterval(0.005)",
    ),
    "sys.argv": Kind(
        "sys.argv.append($)",
        "sys.argv[-1]",
        "sys.argv.append($)",
        "KEPT = sys.argv[:]\n",
        "sys.argv[:] = KEPT",
    ),
    "sys.path": Kind(
        "sys.path.append('/%d' % $)",
        "int(sys.path[-1][1:])",
        "sys.path.append('/%d' % $)",
        "KEPT = sys.path[:]\n",
        "sys.path[:] = KEPT",
    ),
    "cwd": Kind(
        "os.chdir(HERE)",
        "len(os.getcwd()) + 1",
        "os.chdir('/' if $ == 3 else '/tmp')",
        "HERE = os.getcwd()\n",
        "os.chdir(HERE)",
    ),
    "locale": Kind(
        "None",
        "(2.0 if locale.setlocale(locale.LC_NUMERIC) == 'C' else 3.0)",
        "locale.setlocale(locale.LC_NUMERIC, 'C' if $ == 3 else 'C.UTF-8')",
        "import locale\n",
        "locale.setlocale(locale.LC_NUMERIC, 'C')",
    ),
    "signal": Kind(
        "None",
        "(2.0 if signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN else 3.0)",
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN if $ == 3 else signal.SIG_DFL)",
        "import signal\n",
        "signal.signal(signal.SIGUSR1, signal.SIG_DFL)",
    ),
    "stdout swapped": Kind(
        "None",
        "(2.0 if isinstance(sys.stdin, io.StringIO) else 3.0)",
        "sys.stdin = io.StringIO() if $ == 3 else KEPT",
        "KEPT = sys.stdin\n",
        "sys.stdin = KEPT",
    ),
    "builtin replaced": Kind(
        "setattr(builtins, 'abs', ABS)",
        "abs(-4)",
        "builtins.abs = lambda x: $",
        "ABS = abs\n",
        "builtins.abs = ABS",
    ),
    "math replaced": Kind("setattr(math, 'floor', FLOOR)", "math.floor(4.5)", "math.floor = lambda x: $", """import math
FLOOR = math.floor
""", "math.floor = FLOOR"),
    "torch function replaced": Kind(
        "setattr(torch, 'mv1', FLOOR)",
        "torch.mv1(4.5)",
        "torch.mv1 = lambda x: $",
        """import math
FLOOR = math.floor
""",
        "del torch.mv1",
    ),
    "functional replaced": Kind(
        "setattr(torch.nn.functional, 'relu', RELU)",
        "torch.nn.functional.relu(torch.tensor(2.0))",
        "torch.nn.functional.relu = lambda x: x * $",
        "RELU = torch.nn.functional.relu\n",
        "torch.nn.functional.relu = RELU",
    ),
    "os.environ get": Kind(
        "os.environ.pop('MBW', None) and None",
        "int(os.environ.get('MBW', '4'))",
        "os.environ['MBW'] = '$'",
        "",
        "os.environ.pop('MBW', None)",
    ),
    "os.getenv": Kind(
        "os.environ.pop('MBW', None) and None",
        "int(os.getenv('MBW', '4'))",
        "os.environ['MBW'] = '$'",
        "",
        "os.environ.pop('MBW', None)",
    ),
    "putenv": Kind(
        "os.environ.pop('MBW', None) and None",
        "len(os.environ.get('MBW', ''))  + 1",
        """os.environ.pop('MBW', None)
if $ == 3:
    os.environ['MBW'] = 'abc'""",
        "",
        "os.environ.pop('MBW', None)",
    ),
    "__name__": Kind("named($)", "len(@.__name__)", "@.__name__ = 'x' * $", """
def named(v):
    def f(): pass
    f.__name__ = 'x' * v
    return f
"""),
    "__doc__": Kind("named($)", "len(@.__doc__)", "@.__doc__ = 'x' * $", """
def named(v):
    def f(): pass
    f.__doc__ = 'x' * v
    return f
"""),
    "__annotations__": Kind("named($)", "@.__annotations__['v']", "@.__annotations__['v'] = $", """
def named(v):
    def f(): pass
    f.__annotations__['v'] = v
    return f
"""),
    "__wrapped__": Kind("wrapped($)", "@.__wrapped__()", "@.__wrapped__ = lambda: $", """
def wrapped(v):
    def f(): pass
    f.__wrapped__ = lambda: v
    return f
"""),
    "function __dict__": Kind("marked($)", "@.__dict__['v']", "@.__dict__ = {'v': $}", FUNCTION),
    "default mutable": Kind("function([$])", "@()[0]", "@.__defaults__[0][0] = $", FUNCTION),
    "cell of two": Kind("two($)", "@.get()", "@.put($)", """
def two(v):
    held = [v]
    def get(): return held[0]
    def put(n): held[0] = n
    return types.SimpleNamespace(get=get, put=put)
"""),
    "cell emptied": Kind("emptied($)", "@.get()", "@.put($)", """
def emptied(v):
    def get():
        try: return v
        except NameError: return 4
    def put(n):
        nonlocal v
        v = n
        if n == 3: del v
    return types.SimpleNamespace(get=get, put=put)
"""),
    "global deleted": Kind("set_global($)", "globals().get('GW', 4)", "drop_global($)", """
def set_global(v):
    global GW
    GW = v
def drop_global(v):
    global GW
    GW = v
    if v == 3: del GW
"""),
    "global shadows builtin": Kind(
        "globals().pop('max', None) and None",
        "max(4, 1)",
        "globals().update(max=lambda *a: $)",
        "",
        "globals().pop('max', None)",
    ),
    "module dict": Kind("module($)", "@.v", "vars(@)['v'] = $", """
def module(v):
    m = types.ModuleType('m')
    m.v = v
    return m
"""),
    "module __getattr__": Kind("module($)", "@.v", "@.held = $", """
def module(v):
    m = types.ModuleType('m')
    m.held = v
    m.__getattr__ = lambda name: m.held
    return m
"""),
    "module __getattr__ replaced": Kind("module($)", 'getattr(@, "v", 1)', "@.__getattr__ = lambda name: $", """
def module(v):
    m = types.ModuleType('m')
    m.__getattr__ = lambda name: v
    return m
"""),
    "annotations of a class": Kind("annotated($)", "@.__annotations__['v']", "@.__annotations__['v'] = $", """
def annotated(v):
    return type('C', (), {'__annotations__': {'v': v}})
"""),
    "name of a class": Kind("type('C' * $, (), {})", "len(@.__name__)", "@.__name__ = 'C' * $"),
    "lru_cache info": Kind("cached($)", "@.cache_info().currsize + 1", "@($)", """
def cached(v):
    f = functools.lru_cache(lambda x: x)
    f(v)
    return f
"""),
    "lru_cache cleared": Kind("cached($)", "@(1)", "@.put($); @.cache_clear()", """
def cached(v):
    held = [v]
    f = functools.lru_cache(lambda x: held[0])
    f.put = lambda n: held.__setitem__(0, n)
    return f
"""),
    "partialmethod": Kind("pm($)", "@.f()", "@.v = $", """
def pm(v):
    class P:
        def g(self, k): return self.v * k
        f = functools.partialmethod(g, 2)
    p = P()
    p.v = v
    return p
"""),
    "islice": Kind("itertools.islice(itertools.count($), 200)", "next(@)", "next(@)"),
    "chain": Kind("itertools.chain([$], itertools.count(3))", "next(@)", "next(@)"),
    "zip": Kind("zip(itertools.count($), itertools.count())", "next(@)[0]", "next(@)"),
    "enumerate": Kind("enumerate([$] * 200)", "next(@)[0]", "next(@)"),
    "map object": Kind("map(lambda v: v * 2, itertools.count($))", "next(@)", "next(@)"),
    "filter object": Kind("filter(lambda v: v % 2, itertools.count($))", "next(@)", "next(@)"),
    "reversed": Kind("reversed(range(200 + $))", "next(@) - 199", "next(@)"),
    "range iterator": Kind("iter(range($, 400))", "next(@)", "next(@)"),
    "accumulate": Kind("itertools.accumulate([$] * 200)", "next(@)", "next(@)"),
    "tee": Kind(
        "types.SimpleNamespace(t=itertools.tee(itertools.count($)))",
        "next(@.t[0])",
        "next(@.t[1]); next(@.t[0])",
    ),
    "dict iterator": Kind("iter(dict.fromkeys(range($, 300)))", "next(@)", "next(@)"),
    "own iterator": Kind("Own($)", "next(@)", "next(@)", """
class Own:
    def __init__(self, v): self.v = v
    def __iter__(self): return self
    def __next__(self):
        self.v += 1
        return self.v
"""),
    "generator send": Kind("sending($)", "@.send(None)", "@.send($)", """
def sending(v):
    def g():
        nonlocal v
        while True:
            got = yield v
            v = v if got is None else got
    r = g()
    next(r)
    return r
"""),
    "generator frame": Kind("going($)", "@.gi_frame.f_locals['v']", "next(@)", """
def going(v):
    while True:
        yield v
        v += 1
"""),
    "traceback": Kind("[caught($)]", "depth(@[0])", "@[0] = caught($)", """
def raising(n):
    if n: raising(n - 1)
    raise ValueError(n)
def caught(n):
    try: raising(n)
    except ValueError as e: return e
def depth(error):
    n, place = 0, error.__traceback__
    while place is not None: n, place = n + 1, place.tb_next
    return n
"""),
    "view taken and written": Kind("seen_of($)", "@.u[0]", "@.u = @.a[1:]; @.u.fill_($)", """
def seen_of(v):
    a = torch.full((3,), float(v))
    return types.SimpleNamespace(a=a, u=a[1:])
"""),
}
# fmt: on
