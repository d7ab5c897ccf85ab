"""What Python code still runs natively under `interpret`, by name: C code that has no interpreted form calls it back.

`forms/` holds the C callables that do have one. A generator that C code resumes is interpreted in any case, since its
body resumes the machine. The program's own `sys.settrace` and `sys.setprofile` are refused with InterpreterError.
"""
from __future__ import annotations

# C callable or operation -> the Python code that it calls natively
NATIVE_CALLBACKS: dict[str, str] = {
    "type.__new__": "__set_name__ of the namespace's values, __init_subclass__ of the bases",
    "dict, set, frozenset (look-up, update, comparison)": "__hash__ and __eq__ of keys",
    "list, tuple (comparison, index, count, remove)": "comparison dunders of the items",
    "list.sort, sorted, min, max": "__lt__ and __gt__ of the items or keys",
    "sum, math, operator, functools, itertools, heapq, bisect": "operator dunders, and functions other than reduce's",
    "C iterators (map, filter, zip, enumerate, reversed) over user iterators": "__next__ where not walked at the call",
    "str.format, str %, print, str.join": "__format__, __str__, __repr__ of the arguments; a file's Python write()",
    "re.sub": "a replacement function",
    "functools.lru_cache, functools.partial subclasses, cached wrappers in C": "the wrapped function",
    "collections.defaultdict, dict.setdefault, dict subclasses": "the factory, __missing__ when called by C code",
    "threading, _thread, signal, atexit, sys.excepthook, gc and weakref callbacks": "the function given",
    "object finalization": "__del__",
    "pickle, copyreg, copy's C helpers, json's C encoder": "__reduce__, __getstate__, default()",
    "isinstance and issubclass of abc.ABC classes": "ABCMeta.__subclasscheck__, __subclasshook__",
    "asyncio's C Task and Future": "callbacks (coroutines themselves are interpreted)",
    "complex, range, slice, bytes, int.from_bytes, operator.index": "__complex__, __index__, __bytes__",
}
