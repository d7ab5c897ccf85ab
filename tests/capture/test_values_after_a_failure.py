"""What a handler reads of tensors that the step wrote into before an operator failed, where the graph has no more use
for them: as Python has them, not as they were made."""

import itertools

import pytest
import torch
from answers import same, told

from moebius import capture

# The statements before, and what the handler returns; the graph reads k of them.
WRITTEN = {
    "in place": ("i = t.clone(); i += 2; k = i.sum()", "i"),
    "by a method": ("i = t * 3; i.mul_(2).add_(1); k = i.sum()", "i"),
    "item": ("i = t.clone(); i[1:] = 7.0; k = i.sum()", "i"),
    "through a view": ("i = t.clone(); v = i[1:]; v += 2; k = v.sum()", "i, v"),
    "under a view": ("i = t.clone(); v = i[1:]; k = v.sum(); i.mul_(3); k = k + i.sum()", "v, i"),
    "view of a view": ("z = torch.zeros(3); z.view(3, 1)[0] += 5; u = z[1:]; u.add_(t[0] + 2); k = z.sum()", "z, u"),
    "in a list": ("l = [t * 2]; l[0].exp_(); k = l[0].sum(); l.append(3)", "l"),
    "counted": ("i = torch.zeros(3); i.index_add_(0, torch.tensor([0, 0, 2]), torch.ones(3)); k = i.sum()", "i"),
}
# Of these the graph keeps what cannot be made once more, where it is the graph that asks whether sizes are equal. (What
# torch raises goes past the handler then, with a note that says so.)
NOT_TWICE = {
    "by another": ("i = t.clone(); z = torch.zeros(3); z[1:] = i[:2]; i.add_(1); k = z.sum() + i.sum()", "z, i"),
    "what it was made of": ("i = t.clone(); j = i + 4; i += 2; k = j.sum() + i.sum()", "j, i"),
    "drawn": ("i = torch.rand(3); i.mul_(2); k = i.sum()", "i"),
    "drawn into": ("i = t.clone(); i.normal_(); k = i.sum()", "i"),
    "with gradients": ("w = t.clone().requires_grad_(); i = w * 2; i.mul_(3); k = i.sum().detach()", "i"),
}
ON_SIZES = ("torch.dot(q, y)", "torch.stack([q, y]).sum(1)")
ON_VALUES = ("torch.linalg.cholesky(torch.diag(x + 0.5)).sum() + 0 * q.sum()",)
CASES = [(name, failing) for name in WRITTEN for failing in ON_SIZES + ON_VALUES]
CASES += [(name, failing) for name in NOT_TWICE for failing in ON_SIZES]
NUMBERS = [[1.0, 1.0, 1.0, -1.0]] * 2 + [[1.0, -1.0, -1.0, -1.0], [1.0, 1.0, -1.0, -1.0], [1.0, 1.0, 1.0, -1.0]]


def made(before, failing, read):
    names = {"torch": torch}
    exec(
        f"def step(x, y, t):\n    {before}\n    q = x[x > 0]\n    try:\n        m = {failing}\n"
        f"    except (RuntimeError, torch.linalg.LinAlgError):\n        return {read}\n    return m * k",
        names,
    )
    return names["step"]


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize(("name", "failing"), CASES)
def test_a_handler_reads_what_was_written(name, failing, backend):
    before, read = (WRITTEN | NOT_TWICE)[name]
    step = made(before, failing, read)
    captured = capture(step, backend=backend)
    for numbers in NUMBERS:
        found = []
        for function in (captured, step):
            torch.manual_seed(0)
            found.append(told(function, torch.tensor(numbers), torch.ones(3), torch.arange(3.0)))
        assert same(*found)


# Names of tensors that share memory, or are one tensor, and that the graph has no more use for.
SHARING = {
    "a view": ("a = t * 2; b = a[1:]; k = b.sum()", "a b"),
    "two views": ("a = t * 2; b = a[1:]; c = a[:2]; k = c.sum() + b.sum()", "b c"),
    "a view whose tensor is gone": ("a = t * 2; b = a[1:]; c = a.view(3, 1); del a; k = c.sum() + b.sum()", "b c"),
    "one tensor": ("a = t * 2; b = a; k = b.sum()", "a b"),
    "what a write gives": ("a = t.clone(); b = a.add_(1); k = a.sum()", "a b"),
    "written": ("a = t.clone(); b = a[1:]; b.mul_(3); c = b[:1]; k = a.sum() + c.sum()", "a b c"),
    "of an argument": ("a = x[1:]; b = a[:2]; k = b.sum()", "x a b"),
    "in a list": ("l = [t * 2]; b = l[0].view(1, 3); k = b.sum(); a = l[0]", "a b"),
    "chunks": ("a = t * 2; b, c, d = a.chunk(3); k = b.sum() + d.sum()", "a b c d"),
    "unbound": ("a = torch.stack([t, t + 1]); b, c = a; k = (b * c).sum()", "a b c"),
    "detached": ("a = t * 2; b = a.detach(); k = b.sum()", "a b"),
    "views by chance": ("a = (t * 2).view(1, 3); b = a.reshape(3); c = a.contiguous(); k = b.sum() + c.sum()", "a b c"),
    "a copy": ("a = t * 2; b = a.clone(); k = b.sum()", "a b"),
    "kept by the graph": ("a = t * 2; b = a[1:]; k = b", "a b"),
    "the whole is kept": ("a = t * 2; b = a[1:]; k = a", "a b"),
    "drawn": ("a = torch.rand(3); b = a[1:]; k = b", "a b"),
}
USES = {"sum": "m * k.sum()", "not": "m"}
LOST = ("drawn", *ON_VALUES, "not")  # nothing that shares its memory is there (``NOT_TWICE``)
SHARED = [case for case in itertools.product(SHARING, ON_SIZES + ON_VALUES, USES) if case != LOST]


@pytest.mark.share(24)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize(("name", "failing", "use"), SHARED)
def test_a_handler_writes_where_they_share_memory(name, failing, use, backend):
    before, names = SHARING[name]
    held = names.split()
    for writes in held:
        each = ", ".join(f"{one}.clone(), {one} is {writes}" for one in held)
        done = {"torch": torch}
        exec(
            f"def step(x, y, t):\n    {before}\n    q = x[x > 0]\n    try:\n        m = {failing}\n"
            f"    except (RuntimeError, torch.linalg.LinAlgError):\n        {writes}.add_(5)\n        return {each}\n"
            f"    return {USES[use]}",
            done,
        )
        captured = capture(done["step"], backend=backend)
        for numbers in NUMBERS:
            found = []
            for function in (captured, done["step"]):
                torch.manual_seed(0)
                given = torch.tensor(numbers)
                found.append((told(function, given, torch.ones(3), torch.arange(3.0)), given))
            assert same(*found), (writes, numbers)
