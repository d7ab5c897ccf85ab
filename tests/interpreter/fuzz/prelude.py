"""Classes and functions with visible effects that generated programs use, as source: a program takes those it names."""

from __future__ import annotations

import re

ALWAYS = """
fuel = [120]  # iterations of loops and calls
serials = [0]
def spent():
    fuel[0] -= 1
    return fuel[0] < 0
def note(tag, *values):
    log.append(f"{tag}:{values!r}"[:300])
def say(tag, value):
    log.append(f"{tag}={value!r}"[:300])
    return value
def caught(tag, error):
    log.append((tag, describe(error)))
class Quiet(BaseException):
    pass
class Oops(Exception):
    pass
class Worse(Oops):
    pass
"""

OPERATORS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "and": "&",
    "or": "|",
    "xor": "^",
    "rshift": ">>",
    "matmul": "@",
    "pow": "**",
    "lshift": "<<",
}


def number_class() -> str:
    """Num: operators that answer, decline (NotImplemented) or raise by the number that they hold."""
    lines = [
        "class Num:",
        "    def __init__(self, n): self.n = n",
        "    def __repr__(self): return f'Num({self.n})'",
        "    def weigh(self, tag, other):",
        "        note(tag, self, other)",
        "        if self.n == 2: return NotImplemented",
        "        if self.n == 7: raise Oops(tag)",
        "        return Num((self.n if type(self.n) is int else 0) % 50 + 1)",
    ]
    for stem in OPERATORS:
        lines.append(f"    def __{stem}__(self, other): return self.weigh('{stem}', other)")
        if stem not in ("xor", "pow"):
            lines.append(f"    def __r{stem}__(self, other): return self.weigh('r{stem}', other)")
        if stem in ("add", "mul", "or", "sub"):
            lines.append(f"    def __i{stem}__(self, other): note('i{stem}'); self.n = 3; return self")
    for stem in ("lt", "gt", "le", "ge", "eq"):
        lines.append(f"    def __{stem}__(self, other): return self.weigh('{stem}', other)")
    lines += [
        "    def __hash__(self): note('hash', self); return 1",
        "    def __bool__(self): note('bool', self); return self.n != 3",
        "    def __neg__(self): note('neg'); return Num(-1)",
        "    def __index__(self): note('index'); return 1",
        "    def __call__(self, *args, **kwargs): note('call', args, kwargs); return self",
        "    def __format__(self, spec): note('format', spec); return f'<{spec}>'",
    ]
    return "\n".join(lines) + "\n"


PIECES: dict[str, str] = {
    "Num": number_class(),
    "Loud": '''
class Loud:
    """A data descriptor."""
    def __init__(self, value=0): self.value, self.name = value, '?'
    def __repr__(self): return f'Loud({self.name})'
    def __set_name__(self, owner, name): note('set_name', owner.__name__, name); self.name = name
    def __get__(self, obj, owner):
        note('get', self.name, obj is None)
        return self if obj is None else obj.__dict__.get('loud', self.value)
    def __set__(self, obj, value):
        note('set', self.name, value)
        if value == 7: raise Oops('seven')
        obj.__dict__['loud'] = value
    def __delete__(self, obj): note('delete', self.name); del obj.__dict__['loud']
''',
    "Box": '''
class Box:
    """Attributes of every kind."""
    tag = 'tag'
    total = Loud(1)
    def __init__(self, n, link=None): self.n, self.link = n, link
    def __repr__(self): return f'Box({self.n!r})' if type(self.n) is int else 'Box'
    def __hash__(self): return 11
    def __getattr__(self, name):
        note('getattr', name)
        if name.startswith('m'): return 5
        raise AttributeError(name)
    @property
    def value(self): note('value'); return self.n
    @value.setter
    def value(self, value): note('value=', value); self.n = value
    @value.deleter
    def value(self): note('del value'); raise Oops('value')
    @classmethod
    def make(cls, n): return cls(n)
    @staticmethod
    def plain(n): return n
    def method(self, *args, k=1, **kwargs): note('method', args, k, kwargs); return len(args)
    def __len__(self): note('len'); return 2
''',
    "Word": """
class Word(str):
    def __hash__(self): note('hash word', str(self)); return str.__hash__(self)
    def __eq__(self, other): note('eq word', str(self)); return str.__eq__(self, other)
    def __repr__(self): return f'Word({str(self)})'
""",
    "Slotted": """
class Slotted:
    __slots__ = ('slot', 'n')
    def __init__(self, n): self.n = n
    def __repr__(self): return 'Slotted'
    def __hash__(self): return 12
""",
    "Row": '''
class Row:
    """The old sequence protocol."""
    def __init__(self, n): self.n = n if type(n) is int and 0 <= n < 6 else 3
    def __repr__(self): return f'Row({self.n})'
    def __hash__(self): return 12
    def __getitem__(self, key):
        note('getitem', key)
        if type(key) is slice: return [key.start, key.stop]
        if type(key) is not int: raise KeyError(key)
        if key >= self.n or key < -self.n: raise IndexError(key)
        return key
    def __setitem__(self, key, value): note('setitem', key, value)
    def __delitem__(self, key): note('delitem', key)
    def __len__(self): note('len', self); return self.n
''',
    "Seq": '''
class Seq:
    """An iterator that counts, and raises at 4."""
    def __init__(self, n): self.n, self.at = n if type(n) is int and n < 8 else 2, 0
    def __repr__(self): return f'Seq({self.n})'
    def __hash__(self): return 12
    def __iter__(self): note('iter', self); return self
    def __next__(self):
        self.at += 1
        note('next', self.at)
        if self.at == 5: raise Oops('next')
        if self.at > self.n: raise StopIteration(self.at)
        return self.at
    def __contains__(self, item): note('contains', item); return item
''',
    "Bag": '''
class Bag:
    """A mapping by keys() and __getitem__, for ** and dict()."""
    def __init__(self, n): self.n = n
    def __repr__(self): return 'Bag'
    def __hash__(self): return 12
    def keys(self): note('keys'); return ['k', 'z'] if self.n != 3 else [3]
    def __getitem__(self, key): note('bag', key); return key
    def __missing__(self, key): return 0
''',
    "Dying": '''
class Dying:
    """Says when it is finalized."""
    def __init__(self, n): self.n, self.link = n, None
    def __repr__(self): return 'Dying'
    def __hash__(self): return 12
    def __del__(self): log.append(f"del {self.__dict__.get('n')!r}"[:20])
''',
    "Echo": '''
class Echo:
    """An iterator with send, throw and close, for yield from."""
    def __init__(self): self.left = 3
    def __iter__(self): return self
    def __next__(self): return self.send(None)
    def send(self, value):
        note('send', value)
        self.left -= 1
        if self.left < 0: raise StopIteration('echo')
        return value
    def throw(self, *args):
        note('throw', args[0])
        if isinstance(args[0], Worse): return 'thrown'
        try: raise args[0]
        finally: del args  # no cycle through its traceback, which would keep the callers' variables alive
    def close(self): note('close')
''',
    "Guard": '''
class Guard:
    """A context manager: 1 lets exceptions pass, 2 swallows, 3 raises in exit, 4 raises in enter, 5 replaces."""
    def __init__(self, n, mode=1): self.n, self.mode = n, mode
    def __repr__(self): return f'Guard({self.mode})'
    def __enter__(self):
        note('enter', self)
        if self.mode == 4: raise Worse('enter')
        return self.n
    def __exit__(self, kind, value, trace):
        note('exit', kind and kind.__name__, value, trace is not None and trace.tb_lineno)
        if self.mode == 3: raise Oops('exit')
        if self.mode == 5 and value is not None: raise Worse('instead') from value
        return self.mode == 2
''',
    "AGuard": """
class AGuard:
    def __init__(self, n, mode=1): self.n, self.mode = n, mode
    async def __aenter__(self):
        note('aenter')
        await Pause('aenter')
        if self.mode == 4: raise Worse('aenter')
        return self.n
    async def __aexit__(self, kind, value, trace):
        note('aexit', kind and kind.__name__, value)
        await Pause('aexit')
        if self.mode == 3: raise Oops('aexit')
        return self.mode == 2
""",
    "AIter": """
class AIter:
    def __init__(self, n): self.left = n if type(n) is int and n < 4 else 2
    def __aiter__(self): note('aiter'); return self
    async def __anext__(self):
        self.left -= 1
        if self.left < 0: raise StopAsyncIteration
        await Pause(self.left)
        if self.left == 2: raise Oops('anext')
        return self.left
""",
    "Pause": '''
class Pause:
    """An awaitable that suspends once; what is sent or thrown is seen."""
    def __init__(self, value): self.value = value
    def __await__(self):
        try:
            got = yield self.value
            note('resumed', got)
            return got
        finally:
            note('pause ends')
''',
    "drive_generator": '''
def drive_generator(make, script):
    """Make a generator, step it by a script of sends, throws and closes; log all it gives."""
    it = make()
    for step in script:
        if spent(): break
        try:
            if step is None: note('next', next(it))
            elif step == 'close': note('closed', it.close())
            elif callable(step): note('thrown', it.throw(step()))
            else: note('sent', it.send(step))
        except StopIteration as stop:
            note('stop', stop.value)
        except Exception as error:
            caught('out', error)
    if script and script[-1] == 'close': it.close()
''',
    "drive_coroutine": '''
def drive_coroutine(make, script):
    """Run a coroutine by hand: the event loop of these programs."""
    it = make()
    steps = iter(script)
    begun = False
    try:
        while not spent():
            step = next(steps, 0)
            if callable(step): note('awaits', it.throw(step()))
            elif step == 'close': note('closed', it.close())
            else: note('awaits', it.send(step if begun else None))
            begun = True
    except StopIteration as stop:
        note('returned', stop.value)
    except Exception as error:
        caught('coroutine', error)
    finally:
        it.close()
''',
    "drain_async": '''
async def drain_async(make, script):
    """Step an async generator by a script of asends, athrows and aclose."""
    it = make()
    for step in script:
        if spent(): break
        try:
            if step is None: note('anext', await it.__anext__())
            elif step == 'close': note('aclosed', await it.aclose())
            elif callable(step): note('athrown', await it.athrow(step()))
            else: note('asent', await it.asend(step))
        except StopAsyncIteration:
            note('astop')
        except Exception as error:
            caught('aout', error)
    await it.aclose()
''',
    "Point": """
class Point:
    __match_args__ = ('x', 'y')
    def __init__(self, x, y): self.x, self.y = x, y
    def __repr__(self): return 'Point'
    def __hash__(self): return 12
""",
    "around": '''
def around(tag):
    """A decorator with an argument."""
    note('decorator', tag)
    def wrap(target):
        note('decorates', tag, getattr(target, '__name__', '?'))
        def inner(*args, **kwargs):
            note('calls', tag, len(args), sorted(kwargs))
            return target(*args, **kwargs)
        return inner
    return wrap
''',
    "same": """
def same(target):
    note('same', getattr(target, '__name__', '?'))
    return target
""",
    "Meta": """
class Meta(type):
    @classmethod
    def __prepare__(meta, name, bases, **kwargs):
        note('prepare', name, kwargs)
        return Names()
    def __new__(meta, name, bases, names, **kwargs):
        note('new', name, [key for key in names if not key.startswith('__')])
        return super().__new__(meta, name, bases, dict(names))
    def __init__(cls, name, bases, names, **kwargs): note('init', name)
    def __call__(cls, *args, **kwargs):
        note('meta call', cls.__name__, args)
        return super().__call__(*args, **kwargs)
    def __getattr__(cls, name):
        note('meta getattr', name)
        raise AttributeError(name)
    def __instancecheck__(cls, obj): note('instancecheck'); return True
    def __contains__(cls, item): return item == 1
""",
    "Asked": """
class Asked(type):
    def __getattribute__(cls, name):
        note('asked', name)
        return super().__getattribute__(name)
""",
    "Names": """
class Names(dict):
    def __setitem__(self, key, value):
        if not key.startswith('__'): note('binds', key)
        dict.__setitem__(self, key, value)
    def __missing__(self, key):
        if key == 'ghost': return 'boo'
        raise KeyError(key)
""",
}


IMPORTED = {
    "functools": "reduce partial total_ordering cached_property singledispatchmethod lru_cache",
    "collections": "Counter defaultdict namedtuple deque OrderedDict",
    "itertools": "groupby",
    "datetime": "date",
    "fractions": "Fraction",
    "dataclasses": "dataclass field",
    "enum": "Enum auto",
    "contextlib": "contextmanager suppress",
    "weakref": "ref",
}
PIECES |= {name: f"from {module} import {name}\n" for module, names in IMPORTED.items() for name in names.split()}
PIECES |= {module: f"import {module}\n" for module in ("sys", "re", "traceback")}


def prelude_for(body: str) -> str:
    """The pieces that `body` names, and those that the pieces name."""
    needed: set[str] = set()
    pending = [body]
    while pending:
        words = set(re.findall(r"\w+", pending.pop()))
        for name in words & PIECES.keys() - needed:
            needed.add(name)
            pending.append(PIECES[name])
    return ALWAYS + "".join(PIECES[name] for name in ORDER if name in needed)


ORDER = ["Names", "Meta", "Num", "Loud", *(name for name in PIECES if name not in ("Names", "Meta", "Num", "Loud"))]


def split(source: str) -> tuple[list[str], str]:
    """The names of the pieces that a program begins with ('' is what all have), and its own text."""
    if not source.startswith(ALWAYS):
        return [], source
    names, place = [""], len(ALWAYS)
    for name in ORDER:
        if source.startswith(PIECES[name], place):
            names.append(name)
            place += len(PIECES[name])
    return names, source[place:]
