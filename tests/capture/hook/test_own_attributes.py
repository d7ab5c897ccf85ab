"""Which types look attributes up in another way than ``object`` does."""

import threading
import types
import weakref

import pytest

from moebius.hook import own_attributes


class Plain:
    pass


class Slotted:
    __slots__ = ("a",)


class Read:
    def __getattribute__(self, name):
        return 1


class Written:
    def __setattr__(self, name, value):
        pass


@pytest.mark.parametrize("kind", [object, Plain, Slotted, types.SimpleNamespace, dict, Exception, int])
def test_as_object_does(kind):
    assert own_attributes(kind) == (False, False)


@pytest.mark.parametrize("kind", [type, threading.local, weakref.ProxyType])
def test_in_c(kind):
    assert own_attributes(kind) == (True, True)


def test_in_python():
    assert own_attributes(Read) == (True, False)
    assert own_attributes(Written) == (False, True)
    with pytest.raises(TypeError):
        own_attributes(3)
