"""What the standard library and C code do with Python code: callbacks, library classes, frames and their variables."""

from __future__ import annotations

from .core import Core, Lines

STATIC = ("date(2001, 2, 3)", "deque([1, 2])", "OrderedDict(k=1)", "partial(say, 'partial')", "Fraction(1, 2)")
WALKERS = ("list", "tuple", "set", "sorted", "sum", "max", "any", "all", "dict", "bytes", "len", "next", "reversed")


class Library(Core):
    """Statements that hand Python code to C code, and look at what the machine must keep as it is."""

    def lambda_of_one(self, depth: int) -> str:
        raise NotImplementedError

    def iterable(self, depth: int) -> str:
        raise NotImplementedError

    def library(self, depth: int) -> Lines:
        if self.chance(10):
            return self.managed(depth)
        walrus, suspends = self.walrus, self.suspends
        self.walrus = self.suspends = False  # many of the expressions stand in functions and classes
        lines = self.one_of(
            [
                (3, self.called_back),
                (2, self.static_type),
                (2, self.library_class),
                (1, self.asked_class),
                (2, self.look_at_frames),
                (1, self.weak),
            ],
            depth,
        )
        self.walrus, self.suspends = walrus, suspends
        return list(lines)

    def called_back(self, depth: int) -> Lines:
        pair = "lambda q, w: say('pair', (q, w))[0]"
        return self.pick(
            (
                [f"note('reduced', reduce({pair}, {self.iterable(depth)}, {self.expr('int', 1)}))"],
                [f"note('substituted', re.sub('[a-k]', lambda m: say('match', m[0]) * 2, {self.expr('str', 1)}))"],
                [f"note('extreme', {self.pick(('min', 'max'))}({self.expr('list', 1)}, key={self.lambda_of_one(1)}))"],
                [f"note('until', list(iter(iter({self.expr('list', 1)}).__next__, {self.expr('int', 1)}))[:4])"],
                [f"note('walked', {self.pick(WALKERS)}({self.iterable(depth)}))"],
                [f"note('partial', partial({self.lambda_of_one(1)}, {self.expr('int', 1)})())"],
                [f"note('counted', sorted(Counter({self.expr('list', 1)}).items(), key=repr))"],
                [f"note('grouped', list(dict(groupby({self.expr('list', 1)}, {self.lambda_of_one(1)}))))"],
                [f"note('default', defaultdict(lambda: say('made', 1))[{self.expr('str', 1)}])"],
                [f"note('reduce', {self.pick(('iter', 'reversed'))}({self.expr('list', 1)}).__reduce__()[1:])"],
            )
        )

    def static_type(self, depth: int) -> Lines:
        """Operators and messages of C types whose names have a module."""
        value = self.pick(STATIC)
        other = self.expr(self.pick(("obj", "int", "any")), 1)
        return self.caught(
            [
                self.pick(
                    (
                        f"note('static', {value} {self.pick(('+', '<', '@', '==', 'in', '|'))} {other})",
                        f"note('static', {other} {self.pick(('+', '<', '@', '==', 'in', '|'))} {value})",
                        f"note('spread', same(*{value}))",
                        f"note('spread', dict(**{value}))",
                        f"{self.pick(('i', 'a'))}, *b = {value}",
                        f"with {value} as a: pass",
                        f"{value}.no_such = 1",
                        f"note('item', {value}[{self.expr('int', 1)}])",
                    )
                )
            ]
        )

    def caught(self, lines: Lines) -> Lines:
        raise NotImplementedError

    def library_class(self, depth: int) -> Lines:
        name = self.fresh("L")
        value = self.expr("int", 1)
        return self.pick(
            (
                [
                    "@dataclass(order=True, frozen=True)",
                    f"class {name}:",
                    f"    n: int = {value}",
                    "    xs: list = field(default_factory=lambda: say('factory', []))",
                    "    def __post_init__(self): note('post init', self.n)",
                    f"note('dataclass', {name}(), {name}(1) < {name}(2), {name}() == {name}(1), hash({name}.n))",
                ],
                [
                    f"class {name}(Enum):",
                    f"    one = {value}",
                    "    two = auto()",
                    "    def method(self): return self.name",
                    f"note('enum', list({name}), {name}.two.method(), {name}(1))",
                ],
                [
                    f"{name} = namedtuple('{name}', 'n, tag', defaults=(2,))",
                    f"note('tuple', {name}({value}), {name}(1)._replace(n=3), {name}(1) + (1,))",
                ],
                [
                    f"class {name}:",
                    "    @cached_property",
                    f"    def value(self): return say('once', {value})",
                    "    @singledispatchmethod",
                    "    def method(self, a): return 'any'",
                    "    @method.register(int)",
                    "    def _(self, a): return 'int'",
                    f"o = {name}()",
                    f"note('cached', o.value, o.value, o.method(1), o.method({self.expr('any', 1)}))",
                ],
                [
                    "@total_ordering",
                    f"class {name}(Box):",
                    f"    def __lt__(self, other): note('less'); return {value}",
                    f"    def __eq__(self, other): return say('same', {self.expr('int', 1)})",
                    f"note('ordered', {name}(1) >= {name}(2), {name}(1) > {name}(2))",
                ],
                [
                    "@lru_cache",
                    f"def {name}(q): return say('computed', q)",
                    f"note('cache', {name}(1), {name}(1), {name}({value}), {name}.cache_info())",
                ],
            )
        )

    def asked_class(self, depth: int) -> Lines:
        """A metaclass that says what it is asked for: the machine itself may ask nothing."""
        name = self.fresh("A")
        use = self.pick(
            (
                f"note('add', {name}() + {self.expr('any', 1)})",
                f"note('compared', {name}() == {name}(), {name}() < 1)",
                f"note('instance', isinstance({self.expr('any', 1)}, {name}))",
                f"note('caught', [*{name}()])",
                f"raise {name}()",
                f"note('attribute', {name}().n, {name}.n)",
                f"note('called', {name}()(1))",
                f"match {self.expr('any', 1)}:\n    case {name}(): note('matched')",
                f"with {name}(): pass",
                f"try: raise Oops(1)\nexcept {name}: pass",
            )
        )
        base = self.pick(("", "Box, ", "Num, ", "Exception, "))
        member = self.pick(("n = 1", "def __add__(self, other): return NotImplemented", "__match_args__ = ()"))
        return [
            f"class {name}({base}metaclass=Asked):",
            f"    {member}",
            *self.caught(use.split("\n")),
        ]

    def look_at_frames(self, depth: int) -> Lines:
        known = "[key for key in ('i', 'xs', 'o', 'absent') if key in"
        return self.pick(
            (
                [f"note('frame', {known} sys._getframe().f_locals])"],
                ["note('line', sys._getframe().f_lineno, sys._getframe().f_back is not None)"],
                [
                    "try: raise Oops('frames')",
                    "except Oops as error:",
                    f"    note('trace', {known} error.__traceback__.tb_frame.f_locals])",
                ],
                [
                    "def kept():",
                    f"    i, o = {self.expr('int', 1)}, {self.pick(('Dying(5)', 'Box(1)'))}",
                    "    try: raise Oops('kept')",
                    "    except Oops as found: return found",
                    f"note('kept', {known} kept().__traceback__.tb_frame.f_locals])",
                ],
                ["note('calls', [entry.name for entry in traceback.extract_stack() if entry.name == 'main'])"],
            )
        )

    def weak(self, depth: int) -> Lines:
        name = self.fresh("weak")
        return [
            f"a = {self.pick(('Box(1)', 'Dying(3)', 'Box([])'))}",
            f"{name} = ref(a, lambda _: note('finalized weakly'))",
            f"note('alive', {name}() is a)",
            self.pick(("a = None", "del a", "a = 1", "xs = [a]; a = None")),
            f"note('dead', {name}() is None)",
        ]

    def managed(self, depth: int) -> Lines:
        manager = self.fresh("manager")
        return [
            "@contextmanager",
            f"def {manager}(q):",
            "    note('in', q)",
            "    try: yield q",
            self.pick(("    finally: note('out')", "    except Oops: note('swallowed')", "    except Worse: raise")),
            self.pick((f"with {manager}(1) as a:", f"with suppress(Oops), {manager}(2) as a, {manager}(3):")),
            *self.indent(self.block(depth - 1, 2)),
        ]
