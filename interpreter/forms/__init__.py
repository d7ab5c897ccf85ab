"""Interpreted forms of C callables that run Python code, or look at the running frame. One file a kind.

A form is `form(domain, args, kwargs) -> value`; it is found by the identity of the C callable. What has no form here
and calls Python code back runs that code natively: `moebius.interpreter.natives` lists what is known.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import attributes, callbacks, frames, generators, iteration, objects, warned
from .registry import FORMS, METHOD_FORMS, Form

__all__ = ["FORMS", "attributes", "callbacks", "form_of", "frames", "generators", "iteration", "objects", "warned"]


def form_of(callee: Any) -> Callable[..., Any] | None:
    """The interpreted form of a C callable, or None."""
    form: Form | None = FORMS.get(id(callee))
    if form is not None:
        return form
    if type(callee) in BOUND_KINDS:
        owner = callee.__self__
        method = METHOD_FORMS.get((type(owner), callee.__name__))
        if method is not None:
            return lambda domain, args, kwargs: method(domain, [owner, *args], kwargs)
    return None


BOUND_KINDS = frozenset({type([].sort), type((1).__add__)})
