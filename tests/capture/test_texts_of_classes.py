"""What a class is called is state: a text with a class in it is made anew when that changes."""

from __future__ import annotations

import pytest
import torch

from moebius import capture


class Kind(type):
    def __repr__(cls):
        return cls.__name__ * 2


TEXTS = {
    "repr": repr,
    "str": str,
    "f-string": lambda cls: f"{cls}",
    "converted": lambda cls: f"{cls!r:>3}",
    "ascii": ascii,
    "str.format": "{} of {{}}".format,
    "named field": lambda cls: f"{cls}",
    "part": "{0.__name__} {0}".format,
    "percent": lambda cls: "%s %r" % (cls, cls),  # noqa: UP031
    "held": lambda cls: str([cls, {cls: cls}, (cls,)]),
    "exception": lambda cls: str(KeyError(cls)),
}


@pytest.mark.share(20)
@pytest.mark.parametrize("kind", (type, Kind))
@pytest.mark.parametrize("attribute", ("__name__", "__qualname__", "__module__"))
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_class_that_is_called_otherwise(text, attribute, kind) -> None:
    cls = kind("Shown", (), {})

    def step(x):
        return x * len(text(cls))

    captured, x = capture(step), torch.ones(1)
    for i in range(4):
        if i:
            setattr(cls, attribute, "W" * (20 + i))
        assert captured(x).item() == step(x).item()
