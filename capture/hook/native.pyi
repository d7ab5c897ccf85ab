"""The C extension. Objects that a program refers to are held strongly, except by "weak" slots and "is_weak" checks."""

from collections.abc import Callable
from typing import Any, Final, final

@final
class Absent: ...

ABSENT: Final[Absent]
"""In "dict" and "class" checks: this key or attribute must not exist."""
CHECKS: Final[tuple[str, ...]]
"""The names of all kinds of checks that a program can have."""

@final
class GuardProgram:
    """Guards compiled to one flat program.

    It is for calls with `n_positional` positional arguments and exactly the keyword arguments `kwnames`, in that
    order; other calls fail. Slots say how to reach objects, checks what must hold; both refer to slots by index.

    Slots (a slot that cannot be reached fails the first check that needs it; slots are reached in the order in which
    the checks need them, so that an earlier check can protect a later slot; one that no check needs must still be
    reachable):

    ==================================== ==============================================================================
    ``("arg", i)``                       the i-th argument: positionals first, then keywords
    ``("const", obj)``                   this object
    ``("weak", obj)``                    this object (or what a ``weakref.ref`` refers to) while it is alive
    ``("dict_item", slot, key)``         the dict's item; no subclass method runs
    ``("instance_dict", slot)``          the ``__dict__`` of an instance, module or class; no user code runs
    ``("list_item", slot, i)``           also of subclasses; negative i counts from the end
    ``("tuple_item", slot, i)``          likewise
    ``("attr", slot, name)``             ``getattr``; may run user code
    ``("cell", slot)``                   contents of a cell; an empty cell fails
    ``("type", slot)``                   ``type(obj)``, not ``obj.__class__``
    ``("python", slot, fn, slot, ...)``  ``fn(obj, *objects)``
    ==================================== ==============================================================================

    Checks. A *constant* matches by exact type and value: 1 is not True, 0.0 is not -0.0, NaN is NaN; None, bool, int,
    float, complex, str, bytes, slices, ranges, and tuples and frozensets of those.

    ==================================== ==============================================================================
    ``("is", slot, obj)``                identity
    ``("is_weak", slot, obj)``           identity, without keeping obj alive (a ``weakref.ref`` may be given)
    ``("type", slot, cls)``              exact type
    ``("equal", slot, value)``           the same constant; other hashables: exact type, ``==``, and they print alike
    ``("length", slot, n)``              ``len(obj) == n``
    ``("keys", slot, keys)``             a dict's keys, in order
    ``("absent", slot, key)``            a dict without this key
    ``("contents", slot, items)``        list, tuple, set: each item identical or the same constant, in iteration order
    ``("dict", d, {key: v}, keys)``      this dict's items: identical, the same constant, or ABSENT; ``keys``: all keys
                                         in order, or None. One comparison while nobody writes to the dict
    ``("class", cls, {name: v}, mro)``   what the MRO of the class has under each name, and its MRO; likewise
    ``("instance", obj, cls, d)``        exact type of this object, and that its ``__dict__`` is this dict (None: any);
                                         notices ``obj.__class__ = C`` and ``obj.__dict__ = e``, which "dict" cannot
    ``("function", f, code, d, kwd)``    this function's ``__code__``, ``__defaults__`` and ``__kwdefaults__`` are these
                                         objects (None: none); what is in the dict of defaults is a "dict" check's
    ``("tensor", slot, meta)``           dict of type, dtype, device, layout, shape, stride (None in a tuple: any),
                                         storage_offset, requires_grad, is_leaf, is_conj, is_neg, is_inference;
                                         what is missing or None is not looked at
    ``("static_tensor", t, meta)``       the same for this tensor
    ``("distinct", slot, ...)``          pairwise different objects
    ``("same", slot, slot)``             the same object
    ``("none_of", slot, objects)``       none of these objects
    ``("answers", ((fn, result), ...))`` ``fn()`` is this object or the same constant, for each
    ``("python", fn, slot, ...)``        ``fn(*objects)`` is true
    ==================================== ==============================================================================

    An `Exception` in a guard means that it fails; others (KeyboardInterrupt) propagate.

    Raises ValueError, TypeError or IndexError for a malformed slot or check, naming its index.
    """

    def __new__(
        cls,
        n_positional: int,
        kwnames: tuple[str, ...],
        slots: list[tuple[Any, ...]],
        checks: list[tuple[Any, ...]],
    ) -> GuardProgram: ...
    @property
    def n_checks(self) -> int: ...
    @property
    def n_compared(self) -> int:
        """How many dicts and classes the next check looks at, of those known from the start ("dict", "class").
        All of them by version tag on 3.11; later only those that were written to since."""
    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> bool:
        """Whether all guards hold for a call with these arguments."""
    def explain(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> int | None:
        """Index of the first check that fails; -1: other arguments; n_checks: an unused slot; None: all hold."""
    def time(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, n: int = 1000) -> list[float]:
        """Nanoseconds of each check with the slots that it is the first to need: its share of what its part of a call
        takes (each kind of objects known from the start, and what is reached from the arguments); best mean over n
        runs. ValueError if the guards do not hold."""
    def time_call(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, n: int = 1000) -> float:
        """Nanoseconds of all checks of a call, best mean over n runs."""

@final
class Entry:
    """A callable in front of `function`.

    A call runs the first target whose program holds, most recently hit first, with the same arguments; no frame is
    built for that and no hook installed. Without one it returns ``cold(entry, args, kwargs)``. While `disable` is in
    force, and under a trace function, it calls `function`. goes_on: that is none of the user's, but gives what is still
    to be run of a frame. around: called before such a call; it gives what is called afterwards, with the exception or
    None. It binds like a function and shows the function's name, doc, signature and attributes.
    """

    function: Final[Callable[..., Any]]
    cold: Final[Callable[[Entry, tuple[Any, ...], dict[str, Any]], Any]]
    __wrapped__: Callable[..., Any]
    __name__: str
    __qualname__: str
    def __new__(
        cls,
        function: Callable[..., Any],
        cold: Callable[[Entry, tuple[Any, ...], dict[str, Any]], Any],
        goes_on: bool = False,
        around: Callable[[tuple[Any, ...], dict[str, Any]], Callable[[BaseException | None], Any]] | None = None,
    ) -> Entry: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]: ...
    def __getattr__(self, name: str) -> Any: ...
    def add(self, program: GuardProgram, target: Callable[..., Any]) -> None:
        """Run `target` for calls that `program` accepts; it is tried first."""
    def remove(self, program: GuardProgram) -> bool:
        """Forget its target; False if there is none."""
    def clear(self) -> None:
        """Forget all targets."""
    def later(self, *args: Any) -> Any:
        """The call, to be made by the entry below which the frame runs that returns this."""
    @property
    def targets(self) -> list[tuple[GuardProgram, Callable[..., Any], int]]:
        """(program, target, hits), most recently hit first."""
    @property
    def hits(self) -> int:
        """Calls that a target answered."""
    @property
    def misses(self) -> int:
        """Calls that went to `cold`."""
    @property
    def times(self) -> tuple[float, ...]:
        """Seconds of the newest calls with a graph break in which nothing was captured nor reported."""

def set_own_tracer(tracer: Callable[..., Any] | None, /) -> None:
    """The trace function (``sys.settrace``) under which captured calls still run captured. Under any other each
    ``Entry`` calls its function natively: a debugger or coverage.py is to see every line."""

def is_traced() -> bool:
    """Whether a trace function other than that one is set in this thread."""

def disable() -> None:
    """Every Entry calls its function natively and the frame hook takes nothing, until `enable`."""

def enable() -> None: ...
def is_disabled() -> bool: ...
def finish(result: Any, /) -> Any:
    """The result of a call that no entry made, with what `Entry.later` and `leave_to` put off run to its end."""

def leave_to(callable: Callable[[list[Any]], Any], /, *values: Any) -> Any:
    """The call of it with a list of the values, made by the entry below which the frame runs that returns this, once
    that frame is left: nobody but the list holds the values then."""

def leave_to_call(callable: Callable[..., Any], args: tuple, kwargs: dict[str, Any], /) -> Any:
    """The same for any call."""

def call_timed(
    clock: Callable[[], float],
    ended: Callable[[float, bool], Any],
    callable: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``began = clock()``, call it, then ``ended(began, whether it raised)``, which no trace function sees."""

def call_with_cells(code: Any, globals: dict[str, Any], n: int, values: list[Any], /) -> Any:
    """Call a function over this code with the list, whose first ``n`` items go: they are the function's cells."""

def features() -> dict[str, Any]:
    """What the self-tests found here: dict_tags, instance_dict_tags, class_tags, dict_watchers,
    instance_dict_watchers, class_watchers (bool); and how tensors are read: tensor_reading ("memory" or "attributes"),
    tensor_block (words compared at once; 0: none)."""

def own_attributes(kind: type, /) -> tuple[bool, bool]:
    """Whether objects of this type read, and set, attributes in another way than ``object`` does (in C or Python)."""

def uncounted(value: Any, /) -> Any:
    """An iterator of a list, tuple, str or bytes, anything else as it is. From 3.15 on a loop counts through those
    itself, with a number on the stack that is no object."""

def copy_set(items: set[Any], /) -> set[Any]:
    """A copy with the same hash table: what is added to both stands in the same order. (`set.copy` makes another.)"""

def use_watchers(on: bool, /) -> bool:
    """Whether programs built from now on use dict and class watchers, where CPython has them (3.12 and later), and not
    version tags; what it was before."""

def calibrate_tensors(
    library: str, samples: list[tuple[Any, int, int]], toggles: list[tuple[Any, int, int]]
) -> str | None:
    """Find out how this torch lays out tensors: tensor checks then read memory (20 ns), not attributes (500 ns).

    Args:
        library: path of the libtorch_cpu that torch has loaded.
        samples: (tensor, address of its TensorImpl, dispatch key set as int) of strided tensors: the first one plain,
            then a Parameter, conjugate, negative and inference tensors, other ranks, dtypes and devices.
        toggles: the same for at least two fresh float tensors of one dimension; they are changed.

    Returns:
        None: done. Else why not; attributes are read as before.
    """

def memory_overlaps(tensors: tuple[Any, ...], reaches: bytes, order: bytearray, /) -> bytes | None:
    """For each tensor, as int32, the lowest place among those that it has memory in common with, itself included.

    reaches: int64, bytes from the first element to behind the last one, if they are known; else minus the bytes of an
    element. order: int32, the places in the order in which they lay last; it is changed. None: not all of them can be
    read so (see `calibrate_tensors`); ask their attributes.

    Raises ValueError where these are not as many as the tensors.
    """

def read_tensors_by_attributes() -> None:
    """Undo `calibrate_tensors`."""

def set_frame_callback(
    callback: Callable[[Callable[..., Any]], Callable[..., Any] | None] | None, /
) -> Callable[..., Any] | None:
    """callback(function) is asked once by each owner for a code object met under the hook (and again when what it
    answered is gone, or was for a function that is); it returns what to run instead, or None: never ask again. Returns
    the one before."""

def set_settler(switch: Callable[[Any], Any], /) -> None:
    """torch's set_eval_frame: how a hook of torch's that threads have left behind is taken away."""

def settle() -> None:
    """Take away such a hook now, if there is one and none of our calls is under the hook."""

def call_hooked(callable: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call it with the frame hook on for this thread."""

def call_hooked_for(owner: int, whose: Any, callable: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """As call_hooked. What the frame callback returns meanwhile is for this owner alone (a number from 1 on that is
    never used again), and is held weakly. ``hooked_for()`` gives ``whose`` meanwhile."""

def hooked_for() -> Any:
    """``whose`` of the innermost call_hooked_for, or None."""

def call_unhooked(callable: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call it with the frame hook off for this thread."""

def attach(code: Any, callable: Callable[..., Any], *, pass_function: bool = False) -> None:
    """Under the hook, run ``callable(*arguments)`` for calls of this code object, function or method.

    The arguments come in the order of ``co_varnames``: positionals and keyword-only ones, then the tuple of ``*args``
    and the dict of ``**kwargs`` if the function has them. The hook is off for this thread meanwhile. Generators,
    coroutines, class bodies and modules are never taken. Given a function, this is only for functions with its
    globals and its cells; with `pass_function`, ``callable(function, *arguments)`` is for every function made from
    the code.

    Raises ValueError for a bare code object with free variables, unless `pass_function`.
    """

def attached(code: Any, /) -> Callable[..., Any] | None:
    """The newest."""

def detach(code: Any, /) -> None:
    """Forget what is attached or decided; the callback is asked again."""

def mark_skip(code: Any, /) -> None:
    """Never take calls of this code object, function or method."""

def decline(code: Any, /) -> None:
    """Take no calls of this code object, function or method, as if the callback had said so."""

def leave_alone(code: Any, /) -> None:
    """Never take calls of this code object, function or method, nor of what it calls."""

def forget_frames() -> None:
    """Detach everything and ask again about what was declined; `mark_skip` and `leave_alone` stay."""

def is_hooked() -> bool:
    """Whether the hook is on for this thread."""

def evaluator() -> str:
    """Whose frame evaluator is installed: "moebius", "default" or "other"."""
