"""Messages of errors that the machine raises itself and that differ between versions.

What is filled in: {owner} and {got} are types with their modules, {owner_type} and {type} what older C code names them,
{function} what is called, as errors about arguments show it.
"""
from __future__ import annotations

import sys

NOT_AWAITABLE = "object {type} can't be used in 'await' expression"
NOT_A_CONTAINER = "argument of type '{type}' is not iterable"
NOT_A_BOOL = "__bool__ should return bool, returned {type}"
NOT_AN_ITERATOR = "iter() returned non-iterator of type '{type}'"
AWAIT_NOT_AN_ITERATOR = "__await__() returned non-iterator of type '{type}'"
AWAIT_A_COROUTINE = "__await__() returned a coroutine"
NOT_A_HINT = "__length_hint__ must be an integer, not {type}"
NEGATIVE_HINT = "__length_hint__() should return >= 0"
NOT_KEYS = "{owner_type}.keys() returned a non-iterable (type {type})"
NOT_A_MAPPING = "'{type}' object is not a mapping"
STAR_IN_CALL = "{function} argument after * must be an iterable, not {type}"
STARS_IN_CALL = "{function} argument after ** must be a mapping, not {type}"
NOT_A_CLASS_PATTERN = "called match pattern must be a type"
GLOBALS = "dict"
NOT_GLOBALS = "exec() globals must be a dict, not {type}"
ASKS_TWICE = sys.version_info >= (3, 15)  # what follows ** in a call, and is no mapping, for `keys`
COUNTS_TOO_MANY = sys.version_info >= (3, 14)  # `a, b = 1, 2, 3` says how many there are of a list, tuple or dict

if sys.version_info >= (3, 12):
    NOT_A_CLASS_PATTERN = "called match pattern must be a class"
if sys.version_info >= (3, 14):
    NOT_AWAITABLE = "'{type}' object can't be awaited"
    NOT_A_CONTAINER = "argument of type '{type}' is not a container or iterable"
if sys.version_info >= (3, 15):
    NOT_A_BOOL = "{owner}.__bool__() must return a bool, not {got}"
    NOT_AN_ITERATOR = "{owner}.__iter__() must return an iterator, not {got}"
    AWAIT_NOT_AN_ITERATOR = "{owner}.__await__() must return an iterator, not {got}"
    AWAIT_A_COROUTINE = AWAIT_NOT_AN_ITERATOR
    NOT_A_HINT = "{owner}.__length_hint__() must return an int, not {got}"
    NEGATIVE_HINT = "{owner}.__length_hint__() must return a non-negative int"
    NOT_KEYS = "{owner}.keys() must return an iterable, not {got}"
    STAR_IN_CALL = "Value after * must be an iterable, not {type}"
    STARS_IN_CALL = "Value after ** must be a mapping, not {got}"
    NOT_A_CLASS_PATTERN = "class pattern must refer to a class"
    GLOBALS = "dict or a frozendict"
    NOT_GLOBALS = "exec() globals must be a dict or a frozendict, not {got}"
    NOT_A_MAPPING = "'{got}' object is not a mapping"
