"""``str.format`` and ``format_map``: every form of field, of plain values, of the user's objects and of numbers that
only the running step knows. The text, or the error, is plain Python's; where it is a text, the step is one graph."""

import itertools

import pytest
import torch

from moebius import capture, stats


class Meter:
    def __init__(self, value):
        self.val, self.seen = value, [value, {"k": value}]

    def __getitem__(self, key):
        return self.seen[key]


class Written(Meter):
    def __format__(self, spec):
        return f"<{spec}>"

    def __str__(self):
        return "str"

    def __repr__(self):
        return "repr"


WHOLE = ["", "0", "named"]
PARTS = ["", ".val", "[0]", "[1][k]", ".seen[1][k]"]
CONVERSIONS = ["", "!s", "!r"]
WIDTHS = ["", ":>9", ":{width}", ":{width}.{digits}f", ":.2e"]
WRONG = ["{", "}", "{0} {}", "{} {0}", "{7}", "{nothing}", "{0.nothing}", "{0!x}", "{0:{width:{digits}}}"]
WRONG += ["{0[9]}", "{0[}"]
VALUES = {"written": Written, "meter": Meter, "plain": lambda value: value}


def outcome(function, *args):
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001
        return type(error), str(error)


def forms(kind):
    for whole, part, conversion, width in itertools.product(WHOLE, PARTS, CONVERSIONS, WIDTHS):
        if (kind != "plain" or not part) and not (conversion and width.endswith(("f", "e"))):
            if kind != "meter" or part:  # (the text of an object without a method for it holds its address)
                yield f"a {{{whole}{part}{conversion}{width}}} {{{{b}}}}"


def steps(text, value, mapped):
    if mapped:
        return lambda x: (x * 2, text.format_map({"named": value(x), "width": 12, "digits": 3}))
    return lambda x: (x * 2, text.format(value(x), named=value(x), width=12, digits=3))


@pytest.mark.parametrize("runtime", [False, True])
@pytest.mark.parametrize("kind", VALUES)
def test_every_form_of_field(kind, runtime):
    x = torch.tensor([0.5, 2.0])
    made = VALUES[kind]

    def value(x):
        return made(x.sum().item() if runtime else 2.5)

    for text in forms(kind):
        for mapped in (False, True) if "{named" in text else (False,):
            step = steps(text, value, mapped)
            captured = capture(step, backend="eager")
            for given in (x, x * 3):
                assert str(outcome(captured, given)) == str(outcome(step, given)), (text, mapped)
            assert not stats(captured).breaks, text


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_in_a_text_is_said_as_python_says_it(text, mapped):
    step = steps(text, lambda x: Meter(x.sum().item()), mapped)
    x = torch.ones(2)
    assert str(outcome(capture(step, backend="eager"), x)) == str(outcome(step, x))


def test_what_an_object_kept_is_read_again():
    meter = Meter(1.5)
    text = "loss {m.val:.3f} ({m[0]:.1f})"
    step = capture(lambda x: (x * 2, text.format(m=meter)))
    x = torch.ones(2)
    for value in (1.5, 2.5, 3.5, 4.5):
        meter.val = value
        assert step(x)[1] == f"loss {value:.3f} (1.5)"
    assert stats(step).misses <= 3 and not stats(step).breaks
