"""The fake tensors and symbolic sizes of a capture: what this takes of torch's private names, in one place.

Checked on torch 2.13.0 (CPU with Python 3.11, CUDA with 3.12 and 3.13).
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from traceback import StackSummary
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext
from torch._guards import tracing as torch_tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException
from torch.fx.experimental import _config as shapes
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)
from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size as constrain_range_for_size
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from .torch_known import KnownResults, key_of
from .torch_pointwise import SYMBOLS, PointwiseOnRows
from .torch_private import (
    ON_FAKES,
    PASSED_OVER,
    depends_on_values,
    expression,
    is_simulated,
    is_symbolic,
    of_one_rank,
    owns_storage,
    storage_of,
    tree_leaves,
    version_of,
)
from .torch_relations import Listener, Relations, Sizes, nowhere
from .torch_scripts import Scripted
from .torch_sizes import told

# Operators whose C++ form refuses symbolic sizes ("expected to contain only concrete integers"), or takes today's.
NO_CONTEXT = contextlib.nullcontext()
# Their fake form takes bfloat16 alone (torch 2.11 to 2.15); the real one takes these on a CPU, too.
GROUPED = {getattr(where, name, None) for where, name in ((torch, "_grouped_mm"), (torch.nn.functional, "grouped_mm"))}
SQUEEZES = frozenset(
    getattr(packet, kind)
    for packet in (torch.ops.aten.squeeze, torch.ops.aten.squeeze_)
    for kind in ("default", "dim", "dims")
)
# What counts values of a kind, and where fakes remember how many there are.
COUNTED = {
    torch.ops.aten.nonzero.default: "nonzero_memo", torch.ops.aten._unique2.default: "unique_memo",
    torch.ops.aten.unique_consecutive.default: "unique_consecutive_memo",
}
IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType)
SHORTER = (torch.float32, torch.float16)
PADDED = 8  # a result whose width is a multiple of it is dense in every type


class OperatorRecorder(TorchDispatchMode):
    """Writes down each operator that runs on fakes, with what it took and gave, but for those that selective
    checkpointing passes over."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[Any, tuple, dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in PASSED_OVER:
            self.ran.append((func, args, kwargs or {}, out))
        return out


def history_is_lost(tensor: torch.Tensor) -> bool:
    """Whether torch itself refuses to say how it was computed: a view made without gradients whose base requires them
    and was written since."""
    try:
        tensor.is_leaf  # noqa: B018  (the reading raises)
    except RuntimeError:
        return True
    return False


def sizes_can_vary(tensor: torch.Tensor) -> bool:
    """Whether it can be described with symbolic sizes: a view or a result that holds a gradient cannot."""
    plain = tensor.is_leaf and tensor._base is None
    return plain or not (tensor.is_leaf or tensor.retains_grad) or tensor.grad is None


class Fakes(FakeTensorMode):
    """torch's FakeTensorMode, which counts writes and need not ask torch for all."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pointwise = PointwiseOnRows(self)
        self.writes: Counter[int] = Counter()  # by storage
        self.written: list[torch.Tensor] = []  # (kept: a storage that is freed leaves its number to another)
        self.ran = 0  # operators
        self.counts_nothing = False  # whether no count of values is known
        self.given: tuple[Any, ...] = ()  # to the operator that runs now
        self.between: dict[tuple[Any, ...], Any] = {}  # how many rows lie between two numbers
        self.counted_in: dict[tuple[Any, ...], torch.Tensor] = {}  # by their elements: the tensor that has the memo
        self.counted: dict[Any, tuple[Any, ...]] = {}  # by its symbol: of how many, from, to, in steps of
        # by id: what was squeezed along an axis of which only the running step knows whether it has size 1, and what
        # is made of it: it may have an axis less than its fake
        self.rank_in_doubt: dict[int, torch.Tensor] = {}

    def dispatch(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.ran += 1
        doubtful = func in SQUEEZES and ask_of_ones(*args)
        given = tree_leaves((args, kwargs)) if doubtful or self.rank_in_doubt else ()
        if (memo := COUNTED.get(func)) and getattr(args[0], memo) is None:
            self.look_up_count(args[0], memo)
        result = self.run(func, types, args, kwargs)
        if doubtful or any(id(value) in self.rank_in_doubt for value in given):
            self.doubt_ranks(given, result)
        return result

    def look_up_count(self, counted: Any, memo: str) -> None:
        """There are as many values of a kind in a view as in what it is a view of, where it has all its elements."""
        elements = self.elements(counted)
        known = None if elements is None else getattr(self.counted_in.setdefault((memo, *elements), counted), memo)
        if known is not None:
            setattr(counted, memo, known)
        elif self.counts_nothing:
            self.leave_open(counted, memo)

    def elements(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Which elements they are, in their order, and how often they were written; None: there are gaps."""
        if tensor.layout is not torch.strided:
            return None
        count: Any = 1
        for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            if expression(size) != 1 and expression(stride) != count:
                return None
            count = count * expression(size)
        storage = storage_of(tensor)
        return storage, self.writes[storage], expression(tensor.storage_offset()), count, tensor.dtype, tensor.is_neg()

    def leave_open(self, counted: Any, memo: str) -> None:
        """Let how many values there are of a kind be any number, where it would be between 0 and how many there are."""
        assert self.shape_env is not None
        number = self.shape_env.create_unbacked_symint()
        constrain_range_for_size(number)
        setattr(counted, memo, number)

    def doubt_ranks(self, given: Iterable[Any], result: Any) -> None:
        known = {id(value) for value in given}  # (what is written into keeps its axes)
        made = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor) and id(value) not in known]
        self.rank_in_doubt |= {id(value): value for value in made if value.dim()}

    def run(self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        for each in written_by(func, args, kwargs):
            self.note_write(each)
        # torch's cache finds nothing by symbols, which are new each time; making an entry computes the result twice
        self.cache_enabled = not has_symbols((*args, *kwargs.values()))
        asked = super().dispatch
        if self.cache_enabled or self.in_kernel_invocation:
            return asked(func, types, args, kwargs)
        with self.giving(args, kwargs):
            result = self.pointwise.result(lambda args: asked(func, types, args, kwargs), func, args, kwargs)
        if func is torch.ops.aten.slice.Tensor:
            self.compare_slices(result, *args, **kwargs)
        return result

    def compare_slices(
        self, result: torch.Tensor, of: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
    ) -> None:
        """Between the same two numbers lie as many rows of each tensor that has as many. (torch says each time that it
        does not know how many.)"""
        size, given = result.shape[dim], (of.shape[dim], start, end, step)
        if depends_on_values(size):
            key = tuple(expression(one) if is_symbolic(one) else one for one in given)
            self.counted[expression(size)] = given
            torch._check(size == self.between.setdefault(key, size))

    @contextlib.contextmanager
    def giving(self, *given: Any) -> Iterator[None]:
        """Inside, an operator runs that was given this."""
        outer, self.given = self.given, given
        try:
            yield
        finally:
            self.given = outer

    def sizes_given(self) -> set[Any]:
        """The sizes, and the numbers, that the operator which runs now was given, as expressions."""
        leaves = tree_leaves(self.given)
        sizes = [size for leaf in leaves for size in (leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,))]
        return {expression(size) for size in sizes if type(size) in (int, torch.SymInt)}

    def note_write(self, written: torch.Tensor) -> None:
        self.writes[storage_of(written)] += 1
        self.written.append(written)


def writes_into(fake: torch.Tensor) -> float:
    """As ``FakeWorld.writes_into``, of a fake of whichever trace."""
    version = version_of(fake)  # (a DTensor's writes are its local tensor's)
    mode = fake.fake_mode if type(fake) is FakeTensor else None
    return max(mode.writes[storage_of(fake)], version) if isinstance(mode, Fakes) else version


def ask_of_ones(tensor: torch.Tensor, dims: Any = None) -> bool:
    """Whether there is an axis less is asked, and guarded, where torch would take it that no size that varies is 1.
    Returns whether only the running step can say it."""
    chosen = range(tensor.dim()) if dims is None else dims if isinstance(dims, list | tuple) else (dims,)
    sizes = [tensor.shape[dim] for dim in chosen if -tensor.dim() <= dim < tensor.dim()]
    unknown = [depends_on_values(size) for size in sizes]
    for size, is_unknown in zip(sizes, unknown, strict=True):
        if is_symbolic(size) and not is_unknown and shapes.backed_size_oblivious:
            bool(size == 1)
    return any(unknown)


def has_symbols(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, FakeTensor):
            if value._has_symbolic_sizes_strides:
                return True
        elif isinstance(value, SYMBOLS) or (isinstance(value, list | tuple) and has_symbols(value)):
            return True
    return False


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[FakeTensor]:
    """What an operator writes into, by its schema."""
    places = WRITTEN.get(func)
    if places is None:
        schema: Any = getattr(func, "_schema", None)  # (an operator of higher order has none)
        given = schema.arguments if schema is not None and schema.is_mutable else ()
        places = WRITTEN[func] = [(place, each.name) for place, each in enumerate(given) if each.is_write]
    values = [args[place] if place < len(args) else kwargs.get(name) for place, name in places]
    leaves = [leaf for value in values for leaf in (value if isinstance(value, list | tuple) else (value,))]
    return [leaf for leaf in leaves if type(leaf) is FakeTensor and leaf.layout is torch.strided]


WRITTEN: dict[Any, list[tuple[int, str]]] = {}


class FakeWorld:
    """The fake tensors and symbolic sizes of one capture: torch's FakeTensorMode over a ShapeEnv of its own."""

    def __init__(
        self, ours: bool = True, where: Callable[[], Any] = lambda: None, thin: bool = False, on_a_mesh: bool = False
    ) -> None:
        """ours: whether the graph is run as it is, and no backend looks at its operators on fakes of its own. where:
        the user's line that runs now. thin: whether sizes that vary are 1 as well: then nothing is taken of them that
        is otherwise for 1, but under a guard. on_a_mesh: whether the same program counts values elsewhere, too: then
        no count is known, by the size of what is counted here."""
        self.thin = thin
        self.ones: set[str] = set()  # the inputs of which such a size is 1 in this call
        # duck_shape off: two sizes that are equal today are still two sizes.
        self.shape_env = Sizes(
            allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True, duck_shape=False, specialize_zero_one=True
        )
        self.relations = self.shape_env.guards = Relations(where)
        self.regions = self.shape_env.regions = list[Any]()  # that are open: who records them keeps it
        self.mode = Fakes(shape_env=self.shape_env, allow_non_fake_inputs=False)
        self.mode.counts_nothing = on_a_mesh
        self.shape_env.listener, self.counted = Listener(self.mode.sizes_given), self.mode.counted
        self.known = KnownResults(lambda meta, device: FakeTensor(self.mode, meta, device), self.mode.note_write)
        self.recorder: OperatorRecorder | None = None
        self.ours = ours

    def fakify(
        self, tensor: torch.Tensor, name: str, dynamic_dims: Sequence[int] = (), required: bool | None = None
    ) -> torch.Tensor:
        """The fake twin of a real tensor: same metadata, no storage; sizes in ``dynamic_dims`` become symbols.

        required: whether it required gradients when the graph began, where that has run in part.
        """
        if is_simulated(tensor):
            one = of_one_rank(tensor).detach().requires_grad_(tensor.requires_grad)
            fake = self.fakify(one, name, dynamic_dims, required)
            if isinstance(tensor, torch.nn.Parameter):
                fake._is_param = True
            return fake
        if torch.is_inference_mode_enabled() and not tensor.is_inference():
            with torch.inference_mode(False):  # a tensor from before that is first met there can still be trained
                return self.fakify(tensor, name, dynamic_dims, required)
        if required is not None and required is not tensor.requires_grad:  # then it was a leaf
            fake = self.fakify(tensor if tensor.is_leaf else tensor.detach(), name, dynamic_dims)
            return fake.requires_grad_(required)
        if tensor.is_leaf and tensor.grad is not None and tensor.grad.dtype is not tensor.dtype:
            # ``p.data = …`` of another dtype: ``from_tensor`` would set the gradient's fake, which torch refuses
            fake = self.fakify(tensor.detach(), name, dynamic_dims).requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                fake._is_param = True
            return fake
        if not dynamic_dims:
            plain = tensor.is_leaf and tensor._base is None and not tensor.is_inference()
            if plain and type(tensor) in (torch.Tensor, torch.nn.Parameter) and owns_storage(tensor):
                return self.twin(tensor)
            return self.mode.from_tensor(tensor, static_shapes=True)
        if any(tensor.shape[d] == 1 for d in dynamic_dims):
            self.ones.add(name)
        dims = [DimDynamic.DYNAMIC if d in dynamic_dims else DimDynamic.STATIC for d in range(tensor.dim())]
        base: Any = tensor._base
        if base is not None:  # no symbols for what it is a view of, nor for that one's gradient
            base = StatelessSymbolicContext([DimDynamic.STATIC] * base.dim(), constraint_sizes=[None] * base.dim())
        context: Any = StatelessSymbolicContext(dims, constraint_sizes=[None] * tensor.dim(), view_base_context=base)
        source = LocalSource(name)
        if not (tensor.is_leaf or tensor.retains_grad) or tensor.grad is None:
            return self.mode.from_tensor(tensor, source=source, symbolic_context=context)
        # the gradient would be described as well, with symbols of its own
        assert sizes_can_vary(tensor), "a view, or a result, that has a gradient"
        fake = self.mode.from_tensor(tensor.detach(), source=source, symbolic_context=context)
        return fake.requires_grad_(tensor.requires_grad)

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake twin of a leaf that has its storage to itself: what ``from_tensor`` makes, many times faster."""
        meta = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
        )
        fake = FakeTensor(self.mode, meta, tensor.device)
        if isinstance(tensor, torch.nn.Parameter):
            fake._is_param = True
        return fake

    def call(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The function on fakes; where the C++ form takes no symbols, torch's Python form of it."""
        function = python_form(function, args, kwargs)
        if self.ours and function in GROUPED and (dtype := taken_for_bfloat16(args)) is not None:
            with self.mode, self.recorder or NO_CONTEXT:
                rows, weights, *rest = args
                return function(rows.bfloat16(), weights.bfloat16(), *rest, **kwargs).to(dtype)
        asked = None if self.recorder is not None or self.mode.rank_in_doubt else key_of(function, args, kwargs)
        if asked is not None:
            return self.call_known(function, args, kwargs, *asked)
        symbols = any(
            is_symbolic(leaf) or (isinstance(leaf, FakeTensor) and leaf._has_symbolic_sizes_strides)
            for leaf in tree_leaves((args, kwargs))
        )
        backward = function is torch.autograd.grad and bool(self.shape_env.var_to_range)  # of operators with symbols
        if not backward and not symbols:
            with ON_FAKES, self.mode, self.recorder or NO_CONTEXT:
                return function(*args, **kwargs)
        recorder, python = self.recorder or NO_CONTEXT, enable_python_dispatcher()
        with self.mode.giving(args, kwargs), ON_FAKES, self.mode, recorder, python:
            return function(*args, **kwargs)

    def call_known(
        self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], key: Any, fakes: list[Any]
    ) -> Any:
        """The function on fakes, where its ``key`` says what it does."""
        if (found := self.known.again(key, fakes)) is not None:
            return found
        ran, hits, versions = self.mode.ran, FakeTensorMode.cache_hits, list(map(version_of, fakes))
        with ON_FAKES, self.mode:
            result = function(*args, **kwargs)
        if self.mode.ran == ran + 1 and FakeTensorMode.cache_hits == hits + 1:
            self.known.learn(key, fakes, versions, result)
        return result

    def writes_into(self, fake: torch.Tensor) -> float:
        """How often the trace has written into the memory of a tensor, under any name: ``p.data`` is one."""
        return writes_into(fake)

    def told(self, text: str) -> str:
        """A text about what was traced, without names that no user knows."""
        return told(text, self.shape_env.var_to_range)

    def symbolic_int(self, value: int, name: str) -> Any:
        """A SymInt that stands for a Python int which differs from call to call; hinted with today's value."""
        source = LocalSource(name)
        symbol = self.shape_env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        return self.shape_env.create_symintnode(symbol, hint=value, source=source)

    def unknown_number(self) -> Any:
        """A SymInt for an int that nobody knows while tracing."""
        return self.shape_env.create_unbacked_symint()

    def unknown_count(self) -> Any:
        """A SymInt for an int that nobody knows while tracing, but for its not being negative."""
        number = self.unknown_number()
        torch._check(number >= 0)
        return number

    def number_below(self, count: int) -> Any:
        """A SymInt for an int of [0, count) that nobody knows while tracing."""
        number = self.unknown_count()
        torch._check(number < count)
        return number

    def guards(self) -> list[tuple[sympy.Expr, Any]]:
        """What was assumed about symbolic sizes so far, as sympy relations over backed symbols, each with its place."""
        known = zip(self.relations, self.relations.places, strict=True)
        return [(g.expr, place) for g, place in known if not free_unbacked_symbols(g.expr)]

    def bounds(self, symbol: sympy.Symbol) -> tuple[int | None, int | None]:
        """The range that the symbol was assumed to lie in (from 2 for a size that is neither 0 nor 1)."""
        known = self.shape_env.var_to_range.get(symbol)
        if known is None:
            return None, None
        low, high = (int(limit) if limit.is_Integer else None for limit in (known.lower, known.upper))
        # torch's own symbol of a size is positive, so that it never asks whether it is 0
        return 1 if self.thin and low == 0 and symbol.is_positive else low, high

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Inside, torch takes sizes that vary as this world does."""
        before, shapes.backed_size_oblivious = shapes.backed_size_oblivious, self.thin
        try:
            yield
        finally:
            shapes.backed_size_oblivious = before

    def let_go(self) -> None:
        """Of the trace, which is over, and of the stack on which torch made the mode: from CPython 3.13 on its records
        hold the code of each frame, whose constants may hold what it goes on in."""
        self.relations.where, self.regions, self.shape_env.regions = nowhere, [], ()
        self.shape_env.listener = Listener()
        self.mode._stack_trace = StackSummary()

    def forget_pending(self) -> None:
        """Fresh unbacked symbols are bound to our nodes by us; torch need not wait for them."""
        self.shape_env.pending_fresh_unbacked_symbols.clear()


@functools.cache
def overloads_of(function: Callable[..., Any]) -> tuple[Any, ...]:
    """An operator's, but those with ``out``; none of what is no operator in C."""
    name = getattr(function, "__name__", "")
    known = type(function) in IN_C and function in (getattr(torch, name, None), getattr(torch.Tensor, name, None))
    packet: Any = getattr(torch.ops.aten, name, None) if known else None
    return tuple(getattr(packet, each) for each in packet.overloads() if "out" not in each) if packet else ()


@functools.cache
def whole_numbers_of(function: Callable[..., Any]) -> frozenset[int | str]:
    """The places and names of arguments that C takes for ints of today: ``steps`` of ``linspace``. (With another
    axis it is another operator.)"""
    if not hasattr(torch._refs, getattr(function, "__name__", "")):
        return frozenset()
    schemas = [each._schema for each in overloads_of(function)]
    given = ((place, each.name, str(schema)) for schema in schemas for place, each in enumerate(schema.arguments))
    found = [(place, name) for place, name, text in given if f"int {name}" in text and "dim" not in name]
    return frozenset(key for one in found for key in one)


LOG_SUMS = frozenset({torch.logsumexp, torch.special.logsumexp, torch.Tensor.logsumexp})


def like_log_sum(input: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    """A fake of logsumexp's result: torch's own form asks whether there are any numbers at all."""
    result = torch.amax(input, dim, keepdim)
    return result if result.is_floating_point() else result.to(torch.get_default_dtype())


def python_form(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The function, or torch's Python form of it where it would take a number that varies for one of today; of a
    compiled one what it was compiled from."""
    if type(function) is Scripted:
        return function.source
    if function in LOG_SUMS and "out" not in kwargs and any(map(depends_on_values, [*args[:1], *kwargs.values()])):
        return like_log_sum
    keys = [key for key, each in (*enumerate(args), *kwargs.items()) if is_symbolic(each)]
    found = bool(keys) and not whole_numbers_of(function).isdisjoint(keys)
    return getattr(torch._refs, function.__name__) if found else function


@functools.cache
def draws_into(function: Callable[..., Any]) -> bool:
    """Whether an operator draws numbers into a tensor that it is given, ``x.normal_(0, sigma)``: whatever else it is
    given decides nothing that is known of that tensor."""
    tag, overloads = torch.Tag.nondeterministic_seeded, overloads_of(function)
    return bool(overloads) and all(tag in each.tags and each._schema.is_mutable for each in overloads)


def taken_for_bfloat16(args: tuple) -> torch.dtype | None:
    """The type of a grouped product's operands, of which torch has no fake form but for bfloat16."""
    rows, weights = args[:2] if len(args) > 1 else (None, None)
    if not isinstance(rows, FakeTensor) or not isinstance(weights, FakeTensor) or rows.device.type != "cpu":
        return None
    widths = [rows.shape[-1], weights.shape[-1]]
    dense = all(isinstance(width, int) and width % PADDED == 0 for width in widths)
    fits = rows.dtype == weights.dtype and rows.dtype in SHORTER and dense
    return rows.dtype if fits else None


def forget_constant(fake: Any) -> None:
    """Of a fake that torch has made of a number: another call has another number."""
    if isinstance(fake, FakeTensor):
        fake.constant = None


def lacks_fake(error: Exception) -> bool:
    """Whether an operator has no form for fake tensors, or none for sizes that vary. Checked on torch 2.13."""
    without_data = "There was no fake impl registered", "The tensor has a non-zero number of elements, but its data is"
    concrete = "() on tensor with symbolic sizes/strides" in str(error)  # "Cannot call numel() on …", of a form in C
    return isinstance(error, UnsupportedOperatorException) or concrete or str(error).startswith(without_data)


def fails_on_numbers(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether an operator that has failed on sizes and numbers that vary fails on today's, too: then it is the
    program's error. Torch has operators whose forms for fakes take no symbols, each with words of its own."""
    leaves, tree = tree_flatten((args, kwargs))
    varying = [leaf for leaf in leaves if is_symbolic(leaf) or isinstance(leaf, FakeTensor)]
    if not any(is_symbolic(leaf) or leaf._has_symbolic_sizes_strides for leaf in varying):
        return True
    if any(depends_on_values(leaf) for leaf in varying):  # nobody knows today's
        return True
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    args, kwargs = tree_unflatten([of_today(leaf, mode) for leaf in leaves], tree)
    try:
        with ON_FAKES, mode:
            function(*args, **kwargs)
    except Exception:
        return True
    return False


def some_float(value: torch.SymFloat) -> float:
    """Today's, or another one where nobody knows that."""
    return 0.5 if depends_on_values(value) else float(today(value))


def today(value: Any) -> Any:
    """A symbolic scalar's number in this call, of which nothing is guarded. None: nobody knows it."""
    node = value.node
    if node.hint is not None or depends_on_values(value):
        return node.hint
    shapes = node.shape_env  # (torch notes none for an expression that it cannot reduce)
    hint = getattr(shapes, "guarding_hint_or_throw", None) or shapes.size_hint  # (its older name)
    return node.pytype(hint(node.expr))


def of_today(value: Any, mode: FakeTensorMode) -> Any:
    """What an operator is tried on: the value with the sizes, or the number, that it has in this call."""
    if is_symbolic(value):
        return today(value)
    if not isinstance(value, FakeTensor):
        return value
    known = [[today(n) if is_symbolic(n) else n for n in numbers] for numbers in (value.shape, value.stride())]
    meta = torch.empty_strided(*known, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)
    return FakeTensor(mode, meta, value.device)


def forget_fakes() -> None:
    """Empty what torch remembers of operators on fake tensors and of symbolic sizes, process-wide: such entries are
    good for one capture alone, and keep its ShapeEnv alive."""
    FakeTensorMode.cache_clear()
    for method in vars(ShapeEnv).values():  # lru caches, whose keys hold the ShapeEnv
        if callable(clear := getattr(method, "cache_clear", None)):
            clear()


@contextlib.contextmanager
def tracing(world: FakeWorld) -> Iterator[None]:
    """Backends find the capture's fake mode (and so its symbolic sizes) in torch's tracing context."""
    with torch_tracing(TracingContext(world.mode)), world.answering():
        yield
