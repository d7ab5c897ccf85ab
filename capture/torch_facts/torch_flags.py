"""Settings of torch's backends: each is a pair of functions of C, one that tells it and one that sets it.

Not those that are answered otherwise, and not what tracing sets for itself.
"""

from __future__ import annotations

from typing import Any

import torch

from .torch_private import STATE_OF_ALL, STATE_READERS, SWITCHES

NAMES = vars(torch._C)
SWITCHED = (one for found in SWITCHES.values() for one in found)
OF_OTHERS = (torch._C._get_warnAlways, *STATE_READERS, *STATE_OF_ALL, *SWITCHED)
GETTERS: frozenset[Any] = frozenset(
    getter for name, getter in NAMES.items() if name.startswith("_get_") and name.replace("_get_", "_set_", 1) in NAMES
).difference(OF_OTHERS)
