"""The concrete meaning of every operation that touches a value, each a method to override. One file a family."""
from __future__ import annotations

from .attributes import Attributes
from .calls import Calls
from .classes import Classes
from .containers import Containers
from .exceptions import Exceptions
from .generators import Generators
from .matching import Matching
from .names import Names
from .operators import Operators

__all__ = ["Domain"]


class Domain(Operators, Attributes, Containers, Calls, Names, Exceptions, Generators, Classes, Matching):
    """Plain Python. A subclass overrides what it wants to see; the machine sets `machine` before anything runs."""
