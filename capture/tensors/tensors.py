"""What happens to tensors: each operator is run on fakes and written down as one node of the graph.

An operator whose result holds no tensor (``x.dim()``, ``x.shape``) is answered from the fake and leaves no node.
"""

from __future__ import annotations

import contextlib
import keyword
import operator
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering import is_pure

from ..guards.recorder import GuardRecorder, describe_tensor, tensor_meta
from ..guards.sources import Source, part
from ..heap.heap import Heap
from ..python.telling import TellsInPython, may_warn
from ..python.texts import Texts
from ..regions.autograd_joins import Writes, refuse_doubt
from ..torch_facts import torch_fakes, torch_private, torch_sizes
from ..values.expert_numbers import number_of
from ..values.numbers import Number, is_open
from ..values.opaque_tensor import UnfollowedTensor
from ..values.values import ATOMS, SYMBOLIC, Break, TensorMethod, TensorProxy
from . import packed, recurrent, tensor_class
from .aliases import Aliases
from .bounds import ONE_HOT, Bound, like_one_hot, open_classes, sizes_of_new
from .comparisons import QUESTIONS, asked
from .counts import BINCOUNTS, INTEGERS, bins, known_few, number_in, unknown_numbers
from .ctc import CTC_LOSSES, has_open_lengths, like_ctc_loss
from .eithers import as_arguments
from .failing import depends_on_data, lacks_fake
from .fakes import (
    ARITHMETIC,
    as_operand,
    decided_flags,
    dropped_out,
    fake_of,
    has_tensor,
    refuse_answering,
    refuse_doubtful,
    refuse_numbers,
)
from .folding import VARIES, constant, constant_number
from .foreign_memory import ForeignMemory
from .gradients import Gradients, gives_sparse_gradient
from .graphs import GraphWriter
from .index_lists import IndexList
from .indices import any_position, holds_scalar_index, holds_unknown_number, is_scalar_index, selected, selections
from .interfaces import TensorAssumptions
from .layouts import Layouts, refuse_lost_tangent
from .method_kinds import MADE_OF_BOUNDS, MADE_OF_NUMBERS, OTHER_KIND, OUTSIDE, READS_VALUES, RECORDS, TENSOR_ATTRIBUTES
from .numbers import Numbers
from .offsets import Offsets
from .parts import Parts
from .plain_calls import changes_in_place, fakes_of
from .windows import POOLS, like_pool

# Operators whose result's shape is made of the values of their float arguments.
SHAPED_BY_FLOATS = frozenset({"arange", "range", "interpolate", "upsample"})


class TensorOperations:
    """All tensor operators of one trace."""

    def __init__(
        self, world: torch_fakes.FakeWorld, writer: GraphWriter, guards: GuardRecorder,
        dynamic: Callable[[str, torch.Tensor], tuple[int, ...]], whole_step: bool,
    ):  # fmt: skip
        self.world, self.writer, self.guards, self.dynamic = world, writer, guards, dynamic
        self.mode = world.mode  # under which operators run on fakes
        self.proxies: dict[int, TensorProxy] = {}  # by id of the real tensor
        self.of_fake: dict[int, TensorProxy] = {}  # by id of the fake
        self.inputs: list[TensorProxy] = []
        self.offsets, self.parts = Offsets(), Parts(world)
        self.foreign = ForeignMemory()
        self.uncounted: set[int] = set()  # storages of tensors whose .data was read
        self.required_before: dict[str, bool] = {}  # by source: for a trace that is made after the graph has run a part
        self.aliases = Aliases(guards, world)
        self.gradients = Gradients(self, whole_step)
        self.layouts = Layouts(self.gradients.heap)
        self.numbers = Numbers(self)
        self.texts = Texts(self)
        self.whole_step = self.recomputes = self.branches = whole_step
        self.unread: Callable[[Any], bool] = lambda value: False  # a container whose items no guard has seen
        self.may_tell: types.FunctionType | None = None  # a function of torch's that is interpreted where it warns
        self.is_handled: Callable[[], bool] = lambda: False  # whether the running code is in a try- or with-block
        self.speculate: Callable[[Any], bool | None] = lambda value: None  # the way to take at a branch on data

    def assume(self, assumptions: TensorAssumptions) -> None:
        """What earlier captures and attempts taught."""
        self.recomputes, self.branches = assumptions.recomputes, assumptions.branches
        self.aliases.apart, self.aliases.together = assumptions.apart, assumptions.together

    # ------------------------------------------------------------------------------------------------------------------
    # Inputs
    # ------------------------------------------------------------------------------------------------------------------

    def input(self, real: torch.Tensor, source: Source) -> TensorProxy:
        """The proxy of a tensor that existed before. Two sources that lead to one tensor most often share one."""
        if (known := self.aliases.known(real, source)) is not None:
            return known
        if type(real) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and not self.on_ranks(real):
            self.guards.check("type", source, type(real), text=f"type is {type(real).__qualname__}")
            raise UnfollowedTensor(
                "tensor subclass",
                f"a {type(real).__name__} is not understood yet",
                "it runs natively; what works on plain tensors is captured (below FSDP's hooks, modules see those)",
            )
        if real.is_nested or real.layout is not torch.strided or real.is_quantized or real.is_conj() or real.is_neg():
            kept = {"type": type(real), "layout": real.layout, "is_conj": real.is_conj(), "is_neg": real.is_neg()}
            self.guards.check("tensor", source, kept, text=f"layout {real.layout}, conj or neg")
            what = f"a tensor with layout {real.layout} (or conj, neg, quantized) is not understood yet"
            raise UnfollowedTensor("tensor layout", what, "use a plain strided tensor")
        if torch_fakes.history_is_lost(real):
            self.guards.check("tensor", source, {"type": type(real)}, text="a view whose base was written since")
            raise UnfollowedTensor(
                "view made without gradients",
                "it was made under torch.no_grad(), and what it is a view of was written since: torch does not say"
                " how it was computed",
                "make the view again after the write, or take .detach() of it",
            )
        varies = not source.static and torch_fakes.sizes_can_vary(real)
        open_dims = self.dynamic(source.name, real) if varies else ()
        meta = tensor_meta(real, frozenset(open_dims), any_offset=self.whole_step and not source.static)
        if source.static:
            self.guards.static_tensor(source.name, real, meta)
        else:
            self.guards.check("tensor", source, meta, text=describe_tensor(meta))
        try:
            twice = id(real) in self.proxies  # (torch has one fake of each tensor)
            fake = self.world.fakify(
                real.detach() if twice else real, source.name, open_dims, self.required_before.get(source.name)
            )
        except (AssertionError, RuntimeError) as error:  # a view of other numbers, or whose .data is another since
            raise Break("tensor that torch cannot describe", str(error), "clone it before the call") from None
        if real.requires_grad and not isinstance(real, torch.nn.Parameter):
            place, leaf = part(source, "attr", "is_leaf"), real.is_leaf
            self.guards.check("equal", place, leaf, text="is a leaf" if leaf else "was computed from others")
        return self.add_input(real, fake, source)

    def on_ranks(self, real: torch.Tensor) -> bool:
        """Whether an input's rows live on ranks, or all ranks are simulated, and the graph can have it."""
        whole = self.whole_step or isinstance(real, torch.nn.Parameter)
        return torch_private.is_simulated(real) or (lies_on_ranks(real) and whole)

    def add_input(self, real: Any, fake: Any, source: Source) -> TensorProxy:
        scope = self.writer.scope
        root = scope.root()
        node, stack = root.placeholder(readable(source.name)), self.writer.where()
        where = stack[-1:] and stack[-1]
        node.meta.update(val=fake, source=source.name, static=source.static, where=where, stack=stack)
        if is_kind(fake, torch.Tensor):
            node.meta.update(sizes=fake.shape, strides=fake.stride())
        proxy = TensorProxy(self, fake, node)
        proxy.source, proxy.real, proxy.required = source, real, getattr(fake, "requires_grad", False)
        if isinstance(real, torch.nn.Parameter):
            proxy.cls = type(real)
        self.writer.scope = root
        self.writer.bind_symbols(fake, node)
        self.writer.scope = scope
        self.proxies.setdefault(id(real), proxy)
        self.of_fake[id(fake)] = proxy
        self.inputs.append(proxy)
        self.aliases.met_first(proxy)
        self.foreign.look(real, fake)
        if lies_on_ranks(real) and not self.whole_step:  # (a whole step has the parameter itself)
            self.foreign.lies_on_ranks(fake)
        return proxy

    def distinct_inputs(self) -> None:
        """Inputs that were different tensors stay different tensors, where the step can tell."""
        tensors = [p for p in self.inputs if is_kind(p.real, torch.Tensor) and p.source is not None]
        self.offsets.guard(self.guards, [p for p in tensors if p.source is not None and not p.source.static])
        self.aliases.guard()

    # ------------------------------------------------------------------------------------------------------------------
    # Operators
    # ------------------------------------------------------------------------------------------------------------------

    def function(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)`` as a node."""
        if function in MADE_OF_NUMBERS and args and type(args[0]) is IndexList and "pin_memory" not in kwargs:
            return self.method(args[0].proxy, "to", args[0].place(*args[1:], **kwargs), {"copy": True})
        if function in MADE_OF_BOUNDS:
            of = int(function is ONE_HOT)  # its first operand is no bound
            args = (*args[:of], *map(self.bound, args[of:]))
            bounds = kwargs.keys() & {"num_classes"} if of else kwargs.keys()
            kwargs = {**kwargs, **{name: self.bound(kwargs[name]) for name in bounds}}
        return self.run("call_function", function, function, args, kwargs)

    def method(self, proxy: TensorProxy, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """``proxy.name(*args, **kwargs)`` as a node, or a graph break where it leaves the graph."""
        tensor_class.rely_on(self.guards, proxy.cls, name)
        args, kwargs = self.with_flags(args, kwargs)
        if name == "backward":
            return self.gradients.backward([proxy], *args, **kwargs)
        if name == "register_hook":
            return self.gradients.hooks.register(proxy, *args, **kwargs)
        if name == "retain_grad":
            return self.gradients.retain(proxy)
        number_asked = name == "item" or (name in ("__int__", "__index__") and proxy.fake.dtype in INTEGERS)
        if number_asked and self.whole_step and not args and (number := self.item(proxy)) is not None:
            return number
        if name in QUESTIONS and (answer := asked(self, QUESTIONS[name], (proxy, *args), kwargs)) is not None:
            return answer
        if name == "requires_grad_":
            return self.gradients.switch(proxy, *args, **kwargs)
        if name == "tolist" and not args and (known := constant(proxy.node, torch.Tensor.tolist)) is not None:
            return known
        if name == "tolist" and self.whole_step and not args and known_few(proxy.fake):
            return self.record("call_method", name, (proxy,), {}, unknown_numbers(self.world, proxy))
        if name == "tolist" and not args and (numbers := self.numbers.list_of(proxy)) is not None:
            return numbers
        if name in READS_VALUES:
            detail = f"{proxy.describe()}.{name}() gives Python the numbers of a tensor"
            raise Break("tensor read as a number", detail, "keep them in tensors, or read them after the step")
        if name == "__reduce_ex__":
            detail = f"copy.copy() or pickle of {proxy.describe()}"
            hint = "tensor.detach() has the same memory, tensor.clone() its own"
            raise Break("tensor copied by copy", detail, hint)
        if name in OUTSIDE or (name in OTHER_KIND and self.writer.in_loop):
            raise Break(
                f"Tensor.{name}",
                f"{proxy.describe()}.{name}() works on autograd or storage, outside of a graph",
                "nothing to do: the graph goes on after it",
            )
        if name == "type" and args and is_kind(args[0], torch_private.LEGACY_TYPE):
            args = (f"{args[0].__module__}.{args[0].__name__}", *args[1:])  # which a graph's code can say
        if name == "new" and not kwargs and (sizes := sizes_of_new(args)) is not None:
            name, args = "new_empty", (sizes,)
        if name == "size" and len(args) == 1 and is_kind(args[0], int):
            refuse_doubtful(self.world, name, (proxy,))
            return proxy.fake.size(args[0])
        return self.run("call_method", name, getattr(torch.Tensor, name), (proxy, *args), kwargs)

    def has_other_data(self, proxy: TensorProxy) -> None:
        """Its storage is another one from now on, which no count of writes tells."""
        self.uncounted.add(torch_private.storage_of(proxy.fake))
        proxy.node.meta[VARIES] = True

    def item(self, proxy: TensorProxy) -> Any:
        """``proxy.item()`` as a number of the graph, None where it is to be a graph break."""
        for found in (number_of, packed.sequences_of, constant_number):
            if (known := found(proxy.node)) is not None:
                return known
        if self.whole_step and proxy.fake.dtype in INTEGERS and proxy.fake.numel() == 1:
            return self.parts.note(self.record("call_method", "item", (proxy,), {}, number_in(proxy)), proxy)
        return self.numbers.item_of(proxy)

    def run(self, op: str, target: Any, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run on fakes; write the node if tensors come out or anything was changed."""
        plainly = not self.writer.is_inner and not self.foreign.storages
        given = fakes_of(function, args, kwargs) if plainly else None
        if given is not None:
            torch_private.ON_FAKES.forget()
            result = self.computed(function, *given)
        else:
            args, kwargs, result = self.looked_at(function, args, kwargs)
        if not changes_in_place(target, kwargs):
            refuse_doubtful(self.world, function, args, result)
            if not has_tensor(result):
                return result
        recorded = self.record(op, target, args, kwargs, result)
        name = getattr(function, "__name__", "")
        in_place = name.startswith("_foreach_") and name.endswith("_") and args
        return args[0] if in_place else recorded  # (the list that they were given)

    def looked_at(
        self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any], Any]:
        """The arguments of a call as its node has them, and what it gives on fakes."""
        self.refuse_records(getattr(function, "__name__", ""))
        self.offsets.look(function, args, kwargs, self.writer.is_inner)
        self.layouts.refuse_unsure(function, args, kwargs, self.on_fakes)
        args, kwargs = decided_flags(function, *self.with_flags(*as_arguments(self, function, (args, kwargs))))
        if function in BINCOUNTS and is_kind(args[0], TensorProxy) and (count := bins(*args, **kwargs)) is not None:
            result: Any = args[0].fake.new_empty(count, dtype=torch.int64)
        elif function is torch.nn.functional.dropout and (like := dropped_out(*args, **kwargs)) is not None:
            result = self.writer.note_dropout(like)
        elif function in POOLS and (pooled := like_pool(function, args, kwargs)) is not None:
            result = pooled
        elif function is ONE_HOT and (classes := open_classes(self.world, *args, **kwargs)) is not None:
            result = self.on_fakes(like_one_hot, (args[0], classes), {})
        elif function in CTC_LOSSES and has_open_lengths(*args, **kwargs):
            result = self.on_fakes(like_ctc_loss, args, kwargs)
        elif (made := packed.like(function, args)) is not None:
            result = self.on_fakes(made, args, kwargs)
        elif recurrent.has_open_sizes(function, args, kwargs):
            result = self.on_fakes(recurrent.like_recurrent, args, {})
        else:
            result = self.on_fakes(function, args, kwargs)
        refuse_lost_tangent(function, result)
        if "out" in kwargs or getattr(function, "__name__", "").partition(".")[0] in OTHER_KIND:
            self.layouts.changed(kwargs.get("out") if "out" in kwargs else args[0])
        return args, kwargs, result

    def log_to(self, heap: Heap, outside: Any) -> Gradients:
        """heap: of the trace that this belongs to; outside: see ``Gradients``."""
        self.gradients.heap = self.layouts.heap = self.aliases.heap = heap
        self.gradients.outside = outside
        return self.gradients

    def bound(self, value: Any) -> Any:
        """The number in a tensor of one integer: how long the result is follows from it."""
        if type(value) is Bound:
            return value.number
        if not is_kind(value, TensorProxy) or value.fake.dtype not in INTEGERS or value.fake.dim():
            return value
        number = self.item(value)
        return value if number is None else number

    def refuse_records(self, name: str) -> None:
        if name in RECORDS:
            raise Break(f"Tensor.{name}", "a tensor's own records are not in the graph", "read it outside of the step")

    def on_fakes(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The operator's result on fake tensors. Errors that the operator itself raises are the user's."""
        if shaped := getattr(function, "__name__", "") in SHAPED_BY_FLOATS:
            refuse_numbers((args, kwargs))
        self.refuse_unread((args, kwargs))
        refuse_answering((*args, *kwargs.values()))
        if function in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            args = tuple(tuple(a) if type(a) is torch.Size else a for a in args)
        in_numbers = function in MADE_OF_NUMBERS or torch_fakes.draws_into(function)
        in_numbers = in_numbers and is_open((args, list(kwargs.values())))
        given = tuple(map(as_operand, args)) if function in ARITHMETIC else args
        if in_numbers:
            given, kwargs = self.numbers.examples(args), {k: self.numbers.examples(v) for k, v in kwargs.items()}
        fake_args, fake_kwargs = fake_of(given, shaped), fake_of(kwargs, shaped)
        torch_private.ON_FAKES.forget()
        writes = Writes((fake_args, fake_kwargs), self.writer.scope, self.of_fake)
        versions = self.foreign.versions((args, kwargs))
        result = self.computed(function, fake_args, fake_kwargs)
        if in_numbers:
            torch_fakes.forget_constant(result)
        if function is self.may_tell and torch_private.ON_FAKES.last() is not None:
            raise TellsInPython
        writes.note()
        self.foreign.refuse_writes(versions)
        return result

    def computed(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """What the operator gives for these fakes."""
        try:
            return self.world.call(function, args, kwargs)
        except torch_private.DATA_DEPENDENT as error:
            raise depends_on_data(function, error) from None
        except Exception as error:
            leaves = torch_private.tree_leaves((args, kwargs))
            if is_kind(error, RuntimeError) and any(map(torch_private.depends_on_values, leaves)):
                raise depends_on_data(function, error) from None  # of such sizes, it says nothing of the real operator
            if torch_fakes.lacks_fake(error) or not torch_fakes.fails_on_numbers(function, args, kwargs):
                raise lacks_fake(function) from None
            self.refuse_handled(function, error)
            raise

    @property
    def runs_once(self) -> bool:
        """Whether what is written now runs once in each call, so that it may do more than compute."""
        return self.whole_step and not self.writer.is_inner and not self.writer.recomputed

    @contextlib.contextmanager
    def that_may_tell(self, function: types.FunctionType) -> Iterator[None]:
        """Inside, the function raises TellsInPython where its own Python code warns, and a warning can be a node."""
        before, self.may_tell = self.may_tell, function if self.runs_once and may_warn(function) else None
        try:
            yield
        finally:
            self.may_tell = before

    def refuse_handled(self, function: Any, error: Exception) -> None:
        """A graph break if a handler of the user's would see an error of fakes, whose words are not the operator's."""
        error.args = tuple(self.world.told(a) if is_kind(a, str) else a for a in error.args)
        if self.is_handled():
            raise Break(
                "operator that raises",
                f"{getattr(function, '__name__', function)}: {(str(error).splitlines() or [''])[0][:160]}",
                "it runs natively, and a handler sees its own error",
            ) from None

    def refuse_unread(self, value: Any) -> None:
        """A graph break if an operator would look into a container that no guard has seen."""
        if is_kind(value, (tuple, list, dict, set)):
            if self.unread(value):
                raise Break(
                    "container read by an operator",
                    f"a {type(value).__name__} that the step did not make is read in C",
                    "pass a list or a tuple of plain numbers and tensors",
                )
            for item in value.values() if is_kind(value, dict) else value:
                self.refuse_unread(item)

    def record(self, op: str, target: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        node = self.writer.node(op, target, args, kwargs)
        return self.wrap(result, node)

    def wrap(self, result: Any, node: fx.Node) -> Any:
        """The traced value of an operator's result; ``node`` computes it."""
        node.meta["val"] = result
        if is_kind(result, torch.Tensor):
            if (known := self.of_fake.get(id(result))) is not None:  # it gave its operand back: a write, or a cast
                if is_pure(node):
                    node.graph.erase_node(node)
                return known
            self.writer.bind_symbols(result, node)
            self.gradients.sparse = self.gradients.sparse or gives_sparse_gradient(result.grad_fn)
            proxy = self.of_fake[id(result)] = TensorProxy(self, result, node)
            return proxy
        if is_kind(result, SYMBOLIC):
            self.writer.bind_symbols(result, node)
            return result
        if is_kind(result, tuple | list):
            items = []
            for i, item in enumerate(result):
                wraps = is_kind(item, (torch.Tensor, *SYMBOLIC)) or (is_kind(item, tuple | list) and has_tensor(item))
                items.append(self.wrap(item, self.writer_item(node, i)) if wraps else item)
            if hasattr(result, "_fields"):
                return type(result)(*items)
            return type(result)(items)  # (torch.return_types, too: structseq takes one sequence)
        if result is None or type(result) in ATOMS:
            return result
        raise Break("operator result", f"an operator returned a {type(result).__name__}", "please report this operator")

    def writer_item(self, node: fx.Node, index: int) -> fx.Node:
        item = self.writer.graph.call_function(operator.getitem, (node, index))
        item.meta.update(where=node.meta["where"], stack=node.meta["stack"])
        if "number" in node.meta:
            item.meta["number"] = (node.meta["number"], index)
        return item

    # ------------------------------------------------------------------------------------------------------------------
    # Items
    # ------------------------------------------------------------------------------------------------------------------

    def get_item(self, proxy: TensorProxy, key: Any) -> Any:
        """``proxy[key]``. Of a tensor as index torch would read the value; shape and strides are those of any row."""
        at = self.parts.at_the_start(proxy, key)
        self.offsets.taken(proxy, key, self.writer.is_inner, at is not key)
        if is_scalar_index(key):
            with self.world.mode:
                if proxy.fake.dim() == 0:
                    raise IndexError(
                        "invalid index of a 0-dim tensor. Use `tensor.item()` in Python to convert it to a number"
                    )
                result = proxy.fake.select(0, 0)
            return self.record("call_function", operator.getitem, (proxy, key), {}, result)
        if at is not key or holds_unknown_number(key) or holds_scalar_index(key):
            result = self.on_fakes(operator.getitem, (proxy, any_position(at)), {})
            return self.record("call_function", operator.getitem, (proxy, key), {}, result)
        if (steps := selections(key, proxy.fake.dim())) is not None:
            try:
                with self.world.mode:
                    result = selected(proxy.fake, steps)
                return self.record("call_function", operator.getitem, (proxy, key), {}, result)
            except IndexError:  # torch's own index has other words for it
                pass
        return self.function(operator.getitem, (proxy, key), {})

    def set_item(self, proxy: TensorProxy, key: Any, value: Any) -> None:
        """``proxy[key] = value``, in place."""
        at = self.parts.at_the_start(proxy, key)
        if holds_scalar_index(key) or selections(key, proxy.fake.dim()) is not None:
            at = any_position(at)
        self.on_fakes(operator.setitem, (proxy, at, value), {})
        self.writer.call(operator.setitem, proxy, key, value)

    def rows(self, proxy: TensorProxy) -> tuple[Any, ...]:
        """The rows that iterating over the tensor gives, when their number is known."""
        refuse_doubtful(self.world, "iter", (proxy,))
        if proxy.fake.dim() == 0:
            raise TypeError("iteration over a 0-d tensor")
        return tuple(self.function(torch.unbind, (proxy, 0), {}))

    def rows_for_unpacking(self, proxy: TensorProxy, count: int) -> tuple[Any, ...]:
        """``a, b = tensor``."""
        if proxy.fake.dim() and is_kind(proxy.fake.shape[0], torch.SymInt):
            as_many = self.symbolic_truth(proxy.fake.shape[0] == count)
            return tuple(self.function(torch.unbind, (proxy, 0), {})) if as_many else ()
        return self.rows(proxy)

    def with_flags(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Arguments of an operator; what compares sizes is decided, as an operator's flags are bools."""
        if torch.SymBool in map(type, (*args, *kwargs.values())):
            return tuple(self.flag(a) for a in args), {name: self.flag(a) for name, a in kwargs.items()}
        return args, kwargs

    def flag(self, value: Any) -> Any:
        """A value; a comparison of sizes or numbers as the bool that it is in this call."""
        if is_kind(value, Number) and value.kind is bool:
            return self.numbers.truth(value)
        return self.symbolic_truth(value) if type(value) is torch.SymBool else value

    def symbolic_truth(self, value: Any) -> bool:
        """``bool(size expression)``: a guard on backed sizes, a graph break where it depends on values."""
        try:
            return bool(value != 0 if type(value) is torch.SymFloat else value)  # (torch asks which float it is)
        except torch_private.DATA_DEPENDENT:
            if (known := self.speculate(value)) is not None:
                return known
            asked = torch_sizes.in_words(value)
            hint = "use torch.where or a mask instead of the branch"
            raise Break("data-dependent branch", f"Python branches on {asked}", hint) from None

    # ------------------------------------------------------------------------------------------------------------------
    # Attributes
    # ------------------------------------------------------------------------------------------------------------------

    def attribute(self, proxy: TensorProxy, name: str, enter: Callable[[Any, Source], Any]) -> Any:
        """``proxy.name``."""
        if name in proxy.attributes:
            return proxy.attributes[name]
        if name == "data":  # (writes through it count on their own)
            self.uncounted.add(torch_private.storage_of(proxy.fake))
        if name in TENSOR_ATTRIBUTES:
            return self.function(getattr, (proxy, name), {})
        if name == "grad":
            return self.gradients.read(proxy, enter)
        if name == "__class__":
            return proxy.cls
        if name == "grad_fn" and proxy.fake.is_leaf and (proxy.real is None or getattr(proxy.real, "is_leaf", False)):
            return None
        self.refuse_records(name)
        if name in ("__doc__", "__module__", "_python_dispatch"):
            return getattr(proxy.cls, name)
        if proxy.real is not None and is_kind(proxy.real, torch.Tensor) and name in proxy.real.__dict__:
            assert proxy.source is not None
            return enter(proxy.real.__dict__[name], part(part(proxy.source, "instance_dict"), "dict_item", name))
        found = getattr(type(proxy.fake), name, None)
        if is_kind(
            found,
            types.MethodDescriptorType | types.FunctionType | types.WrapperDescriptorType | types.BuiltinFunctionType,
        ):
            return TensorMethod(proxy, name)
        if found is None and not hasattr(torch.Tensor, name):
            if proxy.real is not None and proxy.source is not None:
                self.guards.holds(
                    proxy.source.name, f"has no attribute {name!r}", lambda t: not hasattr(t, name), proxy.source
                )
            raise AttributeError(f"'{proxy.cls.__name__}' object has no attribute '{name}'")
        if name in ("requires_grad", "is_leaf"):
            if proxy.real is None:
                self.writer.refuse_question(name)
            refuse_doubt(proxy.fake, name, self.writer.scope)
        if name == "nbytes":  # (torch's own refuses sizes that are symbols)
            return proxy.fake.numel() * proxy.fake.element_size()
        try:
            value = getattr(proxy.fake, name)
        except RuntimeError as error:
            self.refuse_handled(f"attribute {name}", error)
            raise
        if is_kind(value, torch.Tensor):
            return self.function(getattr, (proxy, name), {})
        if type(value) in ATOMS or is_kind(value, tuple):
            refuse_doubtful(self.world, name, (proxy,))
            return value
        what = f"attribute {name} of a tensor gives a {type(value).__name__}"
        raise Break(f"Tensor.{name}", what, "read it outside of the step")


def lies_on_ranks(tensor: torch.Tensor) -> bool:
    """Whether lowering moved the tensor onto ranks: an expert parameter, its gradient, an optimizer's state of it.
    Whoever reads it sees the whole tensor."""
    module = sys.modules.get("moebius.lowering.distribution")
    return module is not None and is_kind(tensor, module.Sharded)


def readable(name: str) -> str:
    """A source's name as a valid identifier for a placeholder; what a graph break left on the stack is ``stack0``."""
    text = name.removeprefix("L[").replace("'].", "_").replace("._parameters[", "_").replace("_modules[", "")
    word = re.sub(r"^m_(?=stack)", "", re.sub(r"\W", "_", text)[-60:].strip("_"))
    return word if word.isidentifier() and not keyword.iskeyword(word) else f"input_{word}"
