"""Guard programs and frame callbacks as the tests of the hook write them."""

from moebius.hook import GuardProgram, set_frame_callback


def program(slots, checks, n_positional=1, kwnames=()):
    return GuardProgram(n_positional, kwnames, slots, checks)


def holds(slot_path, check, *args):
    """A program whose last slot is looked at by `check` (its slot field is filled in)."""
    p = program(slot_path, [(check[0], len(slot_path) - 1, *check[1:])], n_positional=len(args))
    return p.check(args)


class Plain:
    def __init__(self, **values):
        self.__dict__.update(values)


def asking(answers):
    """A callback that records what it was asked and answers by name."""
    asked = []

    def callback(function):
        asked.append(function.__name__)
        return answers.get(function.__name__)

    set_frame_callback(callback)
    return asked
