"""Activation checkpointing: the checkpointed function is interpreted like any other, between two marks in the graph.

Lowering sees its operators (experts in it are lowered), and then makes them the body of one checkpointed node. What the
function does to Python objects would happen once more when backward runs it again, so a function that changes what
existed before it is a graph break, but for what it would not do again (``recompute``).

A ``context_fn`` that says what is kept all the same is in ``selective``.

With ``use_reentrant=True`` torch runs the function without gradients first, and with them in backward. What it gives is
an autograd function's, which reaches what the function's own operators reach. Questions whose answers differ between
the two runs are graph breaks (``GraphWriter.unasked``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import noop_context_fn

from moebius.interpreter import is_kind
from moebius.lowering.step import ASKED
from moebius.lowering.step.checkpoint import begin_checkpoint, end_checkpoint, from_checkpoint

from ..python.parts import Parts
from ..tensors.applied import Applied
from ..tensors.fakes import leaves
from ..torch_facts import torch_private
from ..torch_facts.torch_checkpoint import DEFAULT_FORM
from ..values.values import Body, Break, TensorProxy
from .later_reads import LaterReads
from .module_reuse import gradient_sources
from .recompute import Again, Read, after
from .selective import Selective
from .subgraphs import operators_written_down

INSTEAD = "pass use_reentrant=False to keep it in the graph"
FOLLOWED = [("determinism_check", "none"), ("early_stop", False)]
DEFAULTS = {"context_fn": noop_context_fn, "determinism_check": "default", "debug": False, "early_stop": True}

CALL = Body(
    "a checkpointed call changes Python state",
    "a {} that existed before the call is changed in it; backward would do that once more",
    "return what it sets, and set it after the call",
)
LENIENT = replace(CALL, lenient=True)


def asked_in_reentrant(what: str) -> Break:
    """It has no gradients the first time."""
    detail = f"with use_reentrant=True, it asks for {what}: backward, which runs it again, has another answer"
    return Break("checkpoint", detail, INSTEAD)


class Checkpoints:
    """Checkpointed calls in one trace. say: what makes a warning a node."""

    def __init__(self, domain: Parts, call: Callable[..., Any], say: Callable[..., None]):
        self.domain, self.call, self.say, self.tensors = domain, call, say, domain.tensors
        self.world, self.of_fake = self.tensors.world, self.tensors.of_fake
        self.gradients = domain.tensors.gradients
        self.writer, self.objects = domain.tensors.writer, domain.objects
        self.strict = any(body is CALL for body, _ in self.objects.inside)

    def run(self, function: Any, args: tuple, options: dict[str, Any]) -> Any:
        """``checkpoint(function, *args, **options)``: a mark, the call, a mark."""
        reentrant = self.form(options.pop("use_reentrant", None))
        preserve = options.pop("preserve_rng_state", True)
        chosen = {name: options.pop(name, default) for name, default in DEFAULTS.items()}
        self.refuse(reentrant, preserve, chosen)
        given = [a for a in args if is_kind(a, TensorProxy)]
        selective = None
        if chosen["context_fn"] is not noop_context_fn:
            selective = Selective(self.domain, self.call, chosen["context_fn"])
        if reentrant:
            self.refuse_reentrant(given, options)
        elif not torch.is_grad_enabled():
            return self.call(function, list(args), options)  # nothing is recorded, so nothing is recomputed
        versions = [torch_private.version_of(p.fake) for p in given]
        kept = None if selective is None else selective.allow_mutation
        known = chosen["determinism_check"], chosen["early_stop"], kept
        begin = self.mark(begin_checkpoint, preserve, reentrant, *known, *given)
        strict = selective is not None or reentrant or self.place() in self.gradients.strict
        body = CALL if strict or self.strict else LENIENT
        counter = self.domain.counter
        again = Again(self.domain, functools.partial(self.call, function, list(args), dict(options)))
        outer = self.writer.recomputed
        self.writer.recomputed, self.writer.unasked = True, asked_in_reentrant if reentrant else None
        read = Read(self.objects.heap, self.writer.count, (*args, *options.values()))
        try:
            writes = nullcontext() if selective is None else operators_written_down(self.tensors)
            with writes, self.objects.within(body), counter.by_autograd():  # (it runs now, and in a part once more)
                result = self.call(function, list(args), options)
        finally:
            read.finish()
            self.writer.recomputed, self.writer.unasked = outer, None
        if not torch.is_grad_enabled():
            raise Break("checkpoint", "the function changes grad mode and does not change it back", "use a with block")
        if selective is not None:
            selective.ask(begin, preserve)
        if reentrant:
            if [torch_private.version_of(p.fake) for p in given] != versions:
                raise Break("checkpoint", "with use_reentrant=True, an argument is changed in place", INSTEAD)
            result = self.leave(begin, given, result)
            left = {r.fake.grad_fn for r in (result if type(result) is tuple else [result]) if is_kind(r, TensorProxy)}
        else:
            again.nodes = list(after(begin))
            left = {f.grad_fn for node in again.nodes for f in leaves(node.meta.get("val")) if is_kind(f, torch.Tensor)}
            self.mark(end_checkpoint)
        applied = Applied(self.place(), frozenset(left - {None}), None, read.is_unchanged, read=read, node=begin)
        applied.ask_later = self.ask_later
        if read.changes_older and not reentrant:
            applied.is_unchanged, applied.unseen = again.is_the_same, True
        self.gradients.applied(applied)
        return result

    def ask_later(self, applied: Applied) -> None:
        """The caller runs backward: the call asks once more for what it was interpreted with before it runs again."""
        if applied.node is not None and applied.read is not None:
            what = f"the checkpointed call at {applied.name.removeprefix('checkpoint ')}"
            applied.node.meta[ASKED] = LaterReads(self.objects).ask(what, applied.name, applied.read.reads)

    def place(self) -> str:
        """The call's, for the report and the policy."""
        file, line, _ = self.writer.where()[-1] if self.writer.where() else ("", 0, "")
        return f"checkpoint {file}:{line}"

    def leave(self, begin: fx.Node, given: list[TensorProxy], result: Any) -> Any:
        """The results of a reentrant call: other tensors for autograd, which knows them as results of the call."""
        results = list(result) if type(result) is tuple else [result]
        tensors = list(dict.fromkeys(r for r in results if is_kind(r, TensorProxy)))
        outside = self.used_in(begin)
        held = {torch_private.storage_of(p.fake) for p in (*given, *outside)}
        if not all(is_kind(r, TensorProxy) or r is None for r in results):
            raise Break("checkpoint", "with use_reentrant=True, it gives something that is no tensor", INSTEAD)
        if any(torch_private.storage_of(t.fake) in held for t in tensors):
            raise Break("checkpoint", "with use_reentrant=True, it gives memory that existed before", INSTEAD)
        self.mark(end_checkpoint, *tensors)
        sources = list(dict.fromkeys(s for t in tensors for s in gradient_sources(t, outside)))
        if not sources:
            raise Break("checkpoint", "with use_reentrant=True, no result needs a gradient", INSTEAD)
        left = {t: self.from_call(t, [s.fake for s in sources]) for t in tensors}
        results = [r if r is None else left[r] for r in results]
        return self.objects.made(tuple(results)) if type(result) is tuple else results[0]

    def from_call(self, tensor: TensorProxy, sources: list[torch.Tensor]) -> Any:
        fake = tensor.fake
        histories = sources if fake.dtype.is_floating_point or fake.dtype.is_complex else []
        made = torch_private.joined(self.tensors.mode, fake, histories)
        return self.tensors.record("call_function", from_checkpoint, (tensor,), {}, made)

    def used_in(self, begin: fx.Node) -> list[TensorProxy]:
        """The tensors from outside that the nodes after this one use."""
        inside, used = set(), set()
        for node in after(begin):
            inside.add(node)
            used.update(node.all_input_nodes)
        older = {n for n in used if n not in inside or n.op == "placeholder"}
        return [p for p in self.of_fake.values() if p.node in older]

    def mark(self, function: Callable[..., None], *args: Any) -> fx.Node:
        return self.writer.call(function, *args)

    def form(self, reentrant: Any) -> Any:
        """``use_reentrant``, or what torch takes for it and says to that where it is not given."""
        if reentrant is not None or DEFAULT_FORM is None:
            return reentrant
        reentrant, told = DEFAULT_FORM
        for one in told:
            self.say(one.text, one.category, one.namespace, one.file, one.line)
        return reentrant

    def refuse(self, reentrant: Any, preserve: Any, chosen: dict[str, Any]) -> None:
        hint = "it runs natively; the graph goes on after it"
        if self.place() in self.gradients.natively:
            detail = "what it reads is changed before backward, which runs it again"
            raise Break("checkpoint", detail, "set it before the call, or after backward")
        if not is_kind(reentrant, bool):
            raise Break("checkpoint", "use_reentrant is not given", "pass use_reentrant to keep it in the graph")
        if not self.tensors.recomputes:
            raise Break("checkpoint", "this backend takes a graph of operators alone", hint)
        plain = not reentrant and chosen["context_fn"] is noop_context_fn
        inside = self.writer.is_inner and not (plain and self.writer.scope.is_branch())
        if inside or (self.writer.recomputed and (reentrant or self.writer.unasked)):
            detail = "in an expert loop, or in another checkpointed call, one of them with use_reentrant=True"
            raise Break("checkpoint", detail, hint)
        names = [name for name, default in DEFAULTS.items() if chosen[name] is not default and chosen[name] != default]
        if not reentrant:
            names = [name for name in names if not self.followed(name, chosen[name])]
        if names or not is_kind(preserve, bool):
            raise Break("checkpoint", f"with its own {', '.join(names) or 'preserve_rng_state'}", hint)

    def followed(self, name: str, value: Any) -> bool:
        """Whether an option of a call without ``use_reentrant`` is known in the graph, or is interpreted."""
        if name == "context_fn":
            return self.world.recorder is None
        return (name, value) in FOLLOWED and type(value) in (str, bool)

    def refuse_reentrant(self, given: list[TensorProxy], options: dict[str, Any]) -> None:
        """What torch raises or warns of, or does without gradients."""
        if options or not torch.is_grad_enabled() or not any(p.fake.requires_grad for p in given):
            raise Break("checkpoint", "use_reentrant=True, and no argument needs a gradient", INSTEAD)
