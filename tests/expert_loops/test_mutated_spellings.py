"""Every spelling with something in it changed: another name, number, operator, order of lines, a line more. What comes
out is plain Python's, whatever becomes of the loop; where plain Python fails nothing is asked."""

from __future__ import annotations

import ast
import copy
import inspect
import linecache
import random
import textwrap

import pytest
from module_spellings import MODULES
from seeds import seed_of_the_code
from spellings import SPELLINGS
from test_written_in_between import compare

LINES = ["{0} = {0} + {1}", "{0} = {0} * 1.5", "{0} = {0}.flip(0)", "{0} = {1} * {0}", "{0} = {0} - 1", "{0} = {0}[1:]",
         "{0} = {0}.roll(1, 0)", "{0} = {0}.clone()", "{0} = {0} + {1}.sum()", "{0} = {0}.detach()"]  # fmt: skip


def another_name(function, names, rng):
    found = [n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in names]
    rng.choice(found).id = rng.choice(names)


def another_number(function, names, rng):
    found = [n for n in ast.walk(function) if isinstance(n, ast.Constant) and type(n.value) in (int, float, bool)]
    node = rng.choice(found)
    node.value = not node.value if type(node.value) is bool else node.value + rng.choice([-1, 1])


def another_operator(function, names, rng):
    found = [n for n in ast.walk(function) if isinstance(n, ast.BinOp | ast.AugAssign)]
    rng.choice(found).op = rng.choice([ast.Add(), ast.Sub(), ast.Mult()])


def another_comparison(function, names, rng):
    found = [n for n in ast.walk(function) if isinstance(n, ast.Compare)]
    rng.choice(found).ops = [rng.choice([ast.Eq(), ast.NotEq(), ast.Gt(), ast.GtE(), ast.Lt()])]


def blocks(function):
    return [node.body for node in ast.walk(function) if isinstance(getattr(node, "body", None), list)]


def twice(function, names, rng):
    block = rng.choice(blocks(function))
    i = rng.randrange(len(block))
    block.insert(i, copy.deepcopy(block[i]))


def other_order(function, names, rng):
    block = rng.choice(blocks(function))
    i = rng.randrange(max(1, len(block) - 2))
    block.insert(i, block.pop(min(i + 1, len(block) - 1)))


def a_line_more(function, names, rng):
    block = rng.choice(blocks(function))
    block.insert(rng.randrange(len(block)), ast.parse(rng.choice(LINES).format(*rng.choices(names, k=2))).body[0])


CHANGES = [another_name, another_number, another_operator, another_comparison, twice, other_order, a_line_more]


def changed(name, rng, number):
    """(the spelling with one or two changes, its text)."""
    function = {**SPELLINGS, **MODULES}[name].function
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    inner = tree.body[0]
    inner.decorator_list = []
    stored = {node.id for node in ast.walk(inner) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for _ in range(rng.choice([1, 1, 2])):
        try:
            rng.choice(CHANGES)(inner, sorted(stored | {a.arg for a in inner.args.args}), rng)
        except IndexError:  # nothing of that kind is in it
            pass
    text = ast.unparse(ast.fix_missing_locations(tree))
    file = f"<changed spellings.py {number}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    namespace = dict(function.__globals__)
    exec(compile(text, file, "exec"), namespace)
    return namespace[function.__name__], text


def ends(function):
    """Whether it surely does, whatever is changed in it."""
    return "while " not in inspect.getsource(function)


NAMES = [name for name, spelling in {**SPELLINGS, **MODULES}.items() if ends(spelling.function)]


@pytest.mark.share(2)
@pytest.mark.parametrize("number", range(8))
def test_as_plain(number):
    rng = random.Random(seed_of_the_code() + number)
    for iteration in range(5):
        name = rng.choice(NAMES)
        try:
            function, text = changed(name, rng, f"{number} {iteration}")
        except SyntaxError:
            continue
        compare(function, name in MODULES, rng.random() < 0.3, text)
