"""The codes of graph breaks: each kind has one, for good. ``moebius help MB012`` and docs/break-codes.md print them.

A code is never given to another kind, and none is left out when its kind no longer occurs. A test holds that each place
in capture/ that breaks a graph has a reason that stands here.
"""

from __future__ import annotations

from dataclasses import dataclass

UNRAISED = "exception that did not come"
FAKE_RAISES = "operator whose fake raises"

@dataclass(frozen=True)
class Code:
    """number: as in MB012. reasons: the texts of ``GraphBreak.reason`` that it stands for; one that ends in "*" stands
    for all that begin like it. meaning: what was met, and why it ends a graph. change: the smallest change that avoids
    it, with ``before`` and ``after`` where lines say it best."""

    number: int
    title: str
    reasons: tuple[str, ...]
    meaning: str
    change: str
    before: str = ""
    after: str = ""

    @property
    def name(self) -> str:
        return f"MB{self.number:03}"


UNKNOWN = Code(0, "Another graph break", (), "It has no code yet: please report it.", "Follow its hint.")

CODES = (
    Code(
        1, "A branch on the values of a tensor", ("data-dependent branch",),
        "An `if`, `while` or `assert` asks for the value of a tensor, and its two ways cannot both be "
        "written into the graph.",
        "Compute both and choose with `torch.where`, or move the branch to the end of the step.",
        "if loss > limit:\n    loss = loss * 0.5", "loss = torch.where(loss > limit, loss * 0.5, loss)",
    ),
    Code(
        2, "A tensor read as a Python number", ("tensor read as a number", "size that depends on values"),
        "`item()`, `float()`, `int()`, `tolist()` or an index needs the value of a tensor while the step is captured.",
        "Keep it a tensor, or read it at the end of the step.",
        "total += loss.item()", "total += loss.detach()          # total is a tensor; read it after the epoch",
    ),
    Code(
        3, "An operator whose result's size depends on values",
        ("data-dependent operator", "iterating over a tensor of unknown length", "tensor made from tensors' numbers"),
        "How many elements there are is known only when the step runs, and Python goes on with the number.",
        "Use a mask of fixed size; for experts, iterate over the hit experts (docs/expert-loops.md).",
    ),
    Code(
        4, "print and progress bars", ("print", "progress bar", "print in *"),
        "What is printed cannot be printed by the graph: values that are not plain, a file whose `write` is the "
        "program's own code, a place inside a loop or checkpoint.",
        "Print plain numbers, strings and tensors, to `sys.stdout` or a file of `io`, outside of loops over experts.",
    ),
    Code(
        5, "logging and warnings", ("logging.Logger", "logging.Logger.*", "warnings.*", "warnings that were recorded"),
        "The message, the handler or the filter is not Python's own, or it is built from objects.",
        "Log plain numbers, strings and tensors, or log after the step.",
    ),
    Code(
        6, "A function that is not to be captured",
        ("disabled function", "function that torch keeps out of graphs", "function outside of the graph"),
        "It is marked with `moebius.disable` or `torch.compiler.disable`, or torch keeps it out of graphs.",
        "Call it before or after the step, or take the mark away.",
    ),
    Code(
        7, "A function in C of which nothing is known",
        ("call into C", "method in C", "class method in C", "object made in C", "len() in C", "* in C", "iterator in C",
         "C attribute", "attributes kept in C", "hidden slot", "slot or C attribute is set",
         "annotations that are made when asked for", "instance dict is shared"),
        "A C extension's code is called: what it reads and changes cannot be seen.",
        "Call it outside of the step, or replace it by torch's operators.",
    ),
    Code(
        8, "An object of a C extension",
        ("item of a C object", "item of a C object is *", "iteration over a C object", "membership in a C object",
         "truth of a C object", "operator of a C object", "comparison of containers", "object of unknown origin"),
        "An object that a C extension made is looked into.", "Turn it into a list, dict or tensor before the step.",
    ),
    Code(
        9, "backward and gradients",
        ("Tensor.backward", "torch.autograd.backward", "torch.autograd.grad", "autograd node", "sparse gradient",
         "forward-mode derivative"),
        "This form of backward runs between two graphs: with a backend of torch.compile's, or on what one graph cannot "
        "hold.",
        "Use `loss.backward()` on tensors of the step with the default backend.",
    ),
    Code(
        10, "Reading or setting .grad and other parts of a tensor",
        ("Tensor.grad", "Tensor.requires_grad_", "Tensor.retain_grad", "Tensor.*", "attribute of a tensor is set",
         "attribute of a tensor's method", "data of a tensor is set", "replaced attribute of tensors",
         "strides of a computed tensor", "super() of a tensor", "tensor machinery used as a value"),
        "A part of a tensor that autograd or its storage owns is asked for or set in the middle of the step.",
        "Read it outside of the step; `zero_grad()`, clipping and the optimizer stay in the graph.",
    ),
    Code(
        11, "autograd.Function",
        ("autograd.Function", "autograd.Function changes Python state", "autograd.Function instance"),
        "Its forward or backward does what a graph of its own cannot: it changes Python objects, or gives "
        "other than tensors.",
        "Let forward and backward work on tensors alone, and save with `ctx.save_for_backward`.",
    ),
    Code(
        12, "Hooks on gradients and modules",
        ("gradient hook", "gradient hook changes Python state", "module backward hook", "module with *"),
        "The hook changes Python state, is registered where the graph cannot call it, or is a module's full "
        "backward hook.",
        "Register hooks outside of the step, and let them return tensors.",
    ),
    Code(
        13, "Activation checkpointing",
        ("checkpoint", "a checkpointed call changes Python state",
         "a selective checkpoint's policy changes Python state"),
        "Backward runs the checkpointed call again, and it changes something or cannot be repeated.",
        "Let the checkpointed function compute tensors, and change nothing.",
    ),
    Code(
        14, "A loop over experts that is left early or changes what it runs over",
        ("expert loop left early", "expert loop changes what it runs over", "expert loop changes the stack",
         "expert loop with a handler in it", "loop that an error may end"),
        "`break`, `return` or an exception may end it, so that one node cannot say it.",
        "Replace `break` by a mask: `continue` is fine.",
    ),
    Code(
        15, "A loop over experts that changes Python objects",
        ("an expert loop changes Python state", "expert loop carries *", "expert loop branches on its number",
         "value of an expert loop's last iteration", "text in a loop or branch",
         "list of what a branch on values appends",
         "container written at a number while it is iterated over"),
        "An iteration appends to a list, counts in a Python number or leaves one behind; how often it runs is data.",
        "Collect results in a tensor (`index_add_`), and count with tensors.",
        "counts.append(len(token))", "counts[expert] = token.numel()          # counts is a tensor",
    ),
    Code(
        16, "The graph's result cannot be handed back", ("result cannot be rebuilt", "operator result"),
        "What the step returns, or what lives on over a graph break, cannot be made again by the code that "
        "runs the graph.",
        "Return tensors and plain containers.",
    ),
    Code(
        17, "A number that only the running step knows",
        ("arithmetic on a number*", "arithmetic on a symbolic size", "arithmetic that may fail",
         "attribute of a number",
         "hash of a number that varies",
         "identity of a number", "type of a number", "builtin that fails on a symbolic size", "symbolic size *",
         "C code that needs a plain number", "plain value from other values", "*number of numpy's"),
        "A learning rate, a size or a count is computed with in a way that a graph cannot say.",
        "Compute it with tensors, or before the step.",
    ),
    Code(
        18, "The text of an object", ("text of *", "template string"),
        "`str()`, `repr()` or an f-string of an object runs code of its class.",
        "Build the text from numbers and strings, or after the step.",
    ),
    Code(
        19, "A value that is another one in each call", ("container that changes from call to call",
         "value that varies from call to call"),
        "It was captured again for it several times, so its value is no longer taken for a constant; here "
        "the step needs it.",
        "Pass it as a tensor, or keep it out of the step.",
    ),
    Code(
        20, "The step raises an exception", ("exception", "operator that raises", "operator that may fail, in a *"),
        "An exception leaves the captured function: Python raises it, where the step does.", "Nothing, if it "
        "is an error.",
    ),
    Code(
        21, "Exceptions that are handled", ("exception from outside is raised", "sys.exc_info()", "sys.exception()"),
        "The handled exception is asked for, or one that existed before the step is raised.", "Raise a new one.",
    ),
    Code(
        22, "Tensors of another kind",
        ("tensor subclass", "tensor layout", "view made without gradients", "frozenset of tensors",
         "legacy tensor type",
         "tensor that torch cannot describe", "numbers of an array", "view that is not known"),
        "A subclass, sparse or quantised tensor, or a view that autograd refuses to follow.",
        "Make it a plain dense tensor before the step.",
    ),
    Code(
        23, "An operator without a description",
        ("operator without a fake", FAKE_RAISES, "object passed to a tensor operator", "object read by an operator",
         "container read by an operator", "operator between *", "comparison between a tensor and an object",
         "out= of other sizes"),
        "torch cannot say what the operator gives without running it, or it is given objects that it may look into.",
        "Register a fake (`torch.library.register_fake`), and pass tensors and numbers.",
    ),
    Code(
        24, "Making tensors, parameters and random generators",
        ("tensor constructor", "parameter made in the step", "random generator", "default device",
         "tensor copied by copy"),
        "It is made in a way that the graph cannot repeat in each call; or a random generator is used in a loop over "
        "experts, in a checkpointed call or for a foreign backend.",
        "Make it once, before the step; draw outside of the loop.",
    ),
    Code(
        25, "numpy", ("write into a numpy array's memory", "numpy*"),
        "What is done with the array is none of torch's operators, or it shares memory with what the step changes.",
        "Use torch's operators on the tensor, or convert the array to one before the step.",
    ),
    Code(
        26, "Classes that the step makes or changes",
        ("class made in the step", "attribute of a class is set", "__dict__ of a class that the step changed",
         "method of another class", "metaclass with its own __getattribute__", "item of a class",
         "defaults that the step changed", "attribute is deleted", "descriptor", "descriptor is deleted",
         "isinstance() of a protocol"),
        "What a class holds is decided while capturing.", "Make and change classes outside of the step.",
    ),
    Code(
        27, "What looks at the running program",
        ("frame object", "inspect.signature", "id()", "identity of *", "object with a finalizer",
         "object dies in the step", "weak reference", "objects of the whole process", "*() in namespaces of its own"),
        "A captured call has other frames, and makes its objects at other times, than plain Python.",
        "Look at them outside of the step.",
    ),
    Code(
        28, "import in the step", ("import", "import *"),
        "`__import__` was replaced, or `sys.modules` has another module under that name.",
        "Import at the top of the file.",
    ),
    Code(
        29, "Modes and transforms of torch",
        ("mode", "function transform", "function transform changes Python state", "switch of torch's",
         "__torch_function__", "function of torch *", "captured function"),
        "A mode, a function transform (vmap, grad) or a replaced function sees each operator.",
        "Capture what calls it, or leave the mode before the step; a transform of what only computes is in the graph.",
    ),
    Code(
        30, "Containers and iterators that cannot be followed",
        ("container of an unknown type", "container initialised again", "iterator from outside", "itertools.groupby",
         "set.pop", "order of a set of tensors", "sequences joined by C", "reversed()",
         "sorting values that are not plain", "key with its own hash", "in-place operator on a container",
         "* read after a write at a number", "* of values that are not plain"),
        "Its order, or what it does when it is read, is not known while capturing.", "Use lists and dicts of "
        "plain keys.",
    ),
    Code(
        31, "Functions whose result their arguments do not decide",
        ("cached function", "functools.singledispatch", "context variable", "coroutine", "pickling in the step",
         "method of a plain value", "method of object", "argument named from", "builtin with arguments it "
         "would look into",
         "keyword arguments built across a graph break"),
        "A cache, the context or an event loop decides too, or what stands in the arguments is "
        "not known while capturing.", "Call it before the step and pass the result; await a coroutine outside of it.",
    ),
    Code(
        32, "A debugger is entered", ("breakpoint",),
        "`breakpoint()` or `pdb.set_trace()`: the whole call runs as Python, so that all locals are there.",
        "Take it out when you are done.",
    ),
    Code(
        33, "An instruction that is not understood", ("interpreter", UNRAISED),
        "That is a bug of moebius; the result is right.", "Please report it.",
    ),
    Code(
        34, "A write into experts that live on other ranks", ("write into experts on other ranks",),
        "With `mesh=` and a backend of torch.compile's this rank's graph has a part of the experts' weights.",
        "Write into them outside of the step, or through the optimizer.",
    ),
)  # fmt: skip

EXACT = {reason: code for code in CODES for reason in code.reasons if "*" not in reason or reason == "import *"}
PATTERNS = [(reason, code) for code in CODES for reason in code.reasons if reason not in EXACT]


def code_of(reason: str) -> Code:
    """The code of a break with this reason; ``UNKNOWN`` if there is none."""
    return EXACT.get(reason) or next((code for pattern, code in PATTERNS if fits(reason, pattern)), UNKNOWN)


def fits(reason: str, pattern: str) -> bool:
    before, _, after = pattern.partition("*")
    return reason.startswith(before) and reason.endswith(after)


def by_name(name: str) -> Code | None:
    """The code that is called so: ``MB012``, ``mb12``, ``12``."""
    digits = name.strip().upper().removeprefix("MB")
    return next((code for code in CODES if digits.isdecimal() and code.number == int(digits)), None)


def help_text(code: Code) -> str:
    """What ``moebius help`` prints, in Markdown: a section of docs/break-codes.md."""
    parts = [f"## {code.name}: {code.title}", code.meaning, f"**What to change.** {code.change}"]
    if code.before:
        parts.append(f"```python\n# instead of\n{code.before}\n# write\n{code.after}\n```")
    parts.append("Reported as: " + ", ".join(f"`{reason.replace('*', '…') if reason != 'import *' else reason}`"
                                             for reason in code.reasons) + ".")  # fmt: skip
    return "\n\n".join(parts)


def page() -> str:
    """docs/break-codes.md."""
    intro = (
        "# Graph breaks, by code\n\nA graph break is a place where the graph ends, Python runs one thing by itself, "
        "and the next graph begins. The result\nis right either way. Each kind has a code; `moebius help MB002` prints "
        "its section.\n"
        "This page is written by `python -m moebius help --page`.\n"
    )
    return intro + "\n" + "\n\n".join(map(help_text, CODES)) + "\n"
