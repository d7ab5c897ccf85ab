"""Selective activation checkpointing: ``checkpoint(..., context_fn=partial(create_selective_checkpoint_contexts, f))``.

The context function and its policy are interpreted. While the checkpointed call is traced, a dispatch mode writes down
what operators run on the fakes, node by node; after it the policy is asked of each, in that order, as torch asks
while they run. The answers are what the graph goes by (``lowering.step.selective``): no code of the user's runs in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from moebius.interpreter import is_kind
from moebius.lowering.step.selective import KEPT, bodies_of

from ..guards.sources import Static
from ..python import natives
from ..python.parts import Parts
from ..tensors.graphs import GraphScope
from ..torch_facts import torch_private
from ..values.values import Body, Break, SymbolicObject
from .recompute import after

HINT = "it runs natively; the graph goes on after it"
POLICY = Body(
    "a selective checkpoint's policy changes Python state",
    "a {} that existed before the call is changed in it",
    "make what it counts in anew in each context_fn()",
)
OPERATOR_KINDS = torch_private.OPERATOR_KINDS
OPERATORS = "operators"  # in a node's meta, while the call is traced: what ran on the fakes
KEEPS = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class SelectiveContext(SymbolicObject):
    """One of the two contexts. policy: a function of the user's; None: of the second, which asks no more."""

    __slots__ = ("allow_mutation", "policy")

    def __init__(self, policy: Any, allow_mutation: bool):
        self.policy, self.allow_mutation = policy, allow_mutation

    @property
    def kind(self) -> type:
        return torch_private.SELECTIVE_MODES[self.policy is None]

    def refuse(self, what: str) -> Any:
        raise Break("checkpoint", f"{what} of a context of selective checkpointing", HINT)


def selective_contexts(policy_fn_or_list: Any, allow_cache_entry_mutation: Any = False) -> Any:
    """``create_selective_checkpoint_contexts``, whose contexts are dispatch modes; interpreted."""
    if is_kind(policy_fn_or_list, list):
        for op in policy_fn_or_list:
            if not is_kind(op, OPERATOR_KINDS):
                wrong_operator()

        def policy_fn(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if op in policy_fn_or_list else CheckpointPolicy.PREFER_RECOMPUTE

    elif callable(policy_fn_or_list):
        policy_fn = policy_fn_or_list
    else:
        wrong_operator()
    return context_of(policy_fn, allow_cache_entry_mutation), context_of(None, allow_cache_entry_mutation)


def wrong_operator() -> None:
    """Stands where torch would raise an error."""


def context_of(policy: Any, allow_mutation: Any) -> Any:
    """Stands where a context is made."""


@natives.replaced(wrong_operator)
def refuse_operator() -> None:
    raise Break("checkpoint", "a policy that is neither a function nor a list of operators", "the error is native")


class Selective:
    """One checkpointed call with a ``context_fn`` of the user's."""

    def __init__(self, domain: Parts, call: Callable[..., Any], context_fn: Any):
        self.domain, self.call = domain, call
        self.objects, self.tensors, self.writer = domain.objects, domain.tensors, domain.tensors.writer
        self.random: list[bool] = []  # of each operator that draws random numbers, whether they are kept
        self.begin = domain.objects.heap.mark()  # what the policy counts in is made with it, and is its own
        self.policy, self.allow_mutation = self.contexts(context_fn)

    def contexts(self, context_fn: Any) -> tuple[Any, bool]:
        """The policy, and whether what is kept may be written to."""
        functions = self.domain.calls.functions
        before = {f: functions.get(f) for f in (create_selective_checkpoint_contexts, context_of)}
        running = self.domain.calls.substitute(selective_contexts)
        functions[create_selective_checkpoint_contexts] = lambda *args, **kwargs: self.domain.call_function(
            running, list(args), kwargs
        )
        functions[context_of] = lambda policy, allow: self.objects.made(SelectiveContext(policy, allow))
        try:
            with self.objects.within(POLICY, self.begin):
                made = self.call(context_fn, [], {})
        finally:
            for function, stand_in in before.items():
                functions.pop(function)
                if stand_in is not None:
                    functions[function] = stand_in
        first: Any
        second: Any
        first, second = made if type(made) is tuple and len(made) == 2 else (None, None)
        pair = is_kind(first, SelectiveContext) and is_kind(second, SelectiveContext)
        if not pair or first.policy is None or second.policy is not None or type(second.allow_mutation) is not bool:
            detail = "with a context_fn that gives other contexts than create_selective_checkpoint_contexts"
            raise Break("checkpoint", detail, HINT)
        return first.policy, second.allow_mutation

    def ask(self, begin: fx.Node, preserve: bool) -> None:
        """The policy's answers for all nodes since ``begin``. preserve: whether backward draws the same random numbers.

        Which iterations of a loop are kept, and what is kept of lowered experts, is not what torch keeps. That shows
        where what is computed again is not the same again.
        """
        outer, recomputed = self.writer.scope, self.writer.recomputed
        self.writer.scope = GraphScope(outer)  # what it does to the tensors that it is shown is in no graph
        self.writer.recomputed = True
        try:
            with self.objects.within(POLICY, self.begin), torch.no_grad():
                for node in after(begin):
                    self.ask_of(node)
        except Break:
            raise
        except Exception as error:
            detail = f"its policy raises {type(error).__name__}"
            raise Break("checkpoint", detail, "the error is raised natively") from None
        finally:
            self.writer.scope, self.writer.recomputed = outer, recomputed
        if self.random and (not preserve or any(self.random)):
            detail = "its policy keeps random numbers, or preserve_rng_state=False has others drawn in backward"
            raise Break("checkpoint", detail, HINT)

    def ask_of(self, node: fx.Node) -> None:
        ran = node.meta.pop(OPERATORS, ())
        answers = [(str(function), self.answer(function, args, kwargs, out)) for function, args, kwargs, out in ran]
        if answers:
            node.meta[KEPT] = answers
        for body in bodies_of(node, self.writer.submodules):
            for inner in body.graph.nodes:
                self.ask_of(inner)

    def answer(self, function: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> bool:
        """Whether an operator's results are kept."""
        cls = SelectiveCheckpointContext
        shown = self.objects.enter(cls, Static(cls.__name__, cls))
        context = self.call(shown, [], {"is_recompute": False, "op_output": self.shown(out)})
        operator = self.objects.enter(function, Static(str(function), function))
        arguments = [self.shown(a) for a in args]
        answer = self.call(self.policy, [context, operator, *arguments], {k: self.shown(v) for k, v in kwargs.items()})
        if type(answer) not in (bool, CheckpointPolicy):
            raise Break("checkpoint", f"its policy gives a {type(answer).__name__}", HINT)
        kept = answer if type(answer) is bool else answer in KEEPS
        if draws(function, args, kwargs):
            self.random.append(kept)
        return kept

    def shown(self, value: Any) -> Any:
        """An operator's argument or result as the policy is shown it."""
        if is_kind(value, torch.Tensor):
            return self.tensors.wrap(value, self.writer.placeholder("shown"))
        if type(value) in (list, tuple):
            return self.objects.made(type(value)(self.shown(v) for v in value))
        return value


def draws(function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers; attention does with dropout only."""
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return False
    names = torch_private.argument_names(function)
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0
