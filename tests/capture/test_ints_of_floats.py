"""``int(x.item())`` of floats that the graph computes: how many are kept, where a part begins, what a log prints."""

import itertools
import math

import pytest
import torch
from answers import same, told

from moebius import capture, stats

DATA = torch.arange(12.0)
BODIES = {
    "of an item": "n = int(x[0].item())\n  return DATA[:n].sum(), x.sum()*n",
    "of a tensor": "n = int(x[0])\n  return DATA[:n].sum(), x.sum()*n",
    "of several": "n = int(x)\n  return n, x*2",
    "of one in a row": "n = int(x[:1])\n  return n, DATA[:n]",
    "of bfloat16": "n = int(x[0].bfloat16() / 3)\n  return n, DATA[:n]",
    "of a tensor, handled": "try:\n      n = int(x[0] / 0)\n      return x*n"
    "\n  except (ValueError, OverflowError) as e:\n      return str(e), x",
    "floor": "n = math.floor(x.max().item())\n  return DATA[n:].sum(), n+1",
    "ceil": "n = math.ceil(x.max().item() * 0.7)\n  return torch.zeros(n).shape, n",
    "round": "n = round(x.mean().item())\n  return n*2, DATA[n]",
    "scaled": "k = int(len(x) * x.sigmoid().mean().item())\n  return torch.topk(x, k).values",
    "max": "k = max(1, int(x.mean().item()))\n  return torch.topk(x, min(k, len(x))).values",
    "branch": "n = int(x.sum().item())\n  if n > 3:\n      return x*2\n  return x*n",
    "range": "t = x*0\n  for i in range(int(x[0].item())):\n      t = t + i\n  return t",
    "text": "n = int(x[0].item())\n  return f'{n:03d}', str(n), x*2",
    "held": "d['n'] = int(x[0].item())\n  d['l'].append(d['n'] + 1)\n  return x*2",
    "handler": "try:\n      n = int((x[0]/0).item())\n      return x*n"
    "\n  except (ValueError, OverflowError) as e:\n      return str(e), x",
    "large": "n = int((x[0]*1e25).item())\n  return n, n+1, x*2",
    "half": "n = int(x.half()[0].item())\n  return n, DATA[:n]",
    "inplace": "y = x.clone()\n  n = int(y[0].item())\n  y.add_(3)\n  return n, int(y[0].item()), DATA[:n]",
    "computed with": "n = int(x[0].item())\n  return n / 3, n // 2, n % 2, -n, abs(n), float(n), n == 2, bool(n)",
    "view": "n = int(x[0].item())\n  return DATA.view(-1, 2)[:n], DATA.reshape(2, -1)[:, :n]",
    "slice": "i = int(x[0].item())\n  return DATA[i:i+3].sum()",
    "bins": "n = int(x.max().item())\n  return torch.zeros(n + 1).index_add_(0, x.clamp(0, n).long(), torch.ones(3))",
    "repeat": "n = int(x[0].item())\n  return DATA[:2].repeat(n), [1]*n, 'a'*n",
    "loop": "t = 0\n  for r in x:\n      t = t + DATA[:int(r.item())].sum()\n  return t",
    "grad": "w = x.clone().requires_grad_()\n  l = (w*w).sum()"
    "\n  l.backward()\n  n = int(w.grad.norm().item())\n  return n, w.grad*n",
    "numpy": "import numpy as np\n  n = int(x[0].item())\n  return np.arange(n).tolist(), x*2",
    "format": "return '%d' % x[0].item(), x*2",
}
ONE_GRAPH = (
    "of an item", "of a tensor", "floor", "ceil", "round", "scaled", "max", "held", "of bfloat16", "view", "grad",
)  # fmt: skip
INPUTS = [[2.7, 1.2, 3.9], [2.2, 5.1, 3.3], [0.4, 1.0, 2.0], [1.9, -2.5, 3.5], [3.0] * 3, [-1.5, 0.2, 2.0]]
INPUTS += [[math.nan, 1.0, 2.0], [math.inf, 1.0, 1.0], [1.0, 2.0, 3.0]]


def made(body):
    names, held = {"torch": torch, "DATA": DATA, "math": math}, {"l": []}
    exec(f"def outer(d):\n def step(x):\n  {body}\n return step", names)
    return names["outer"](held), held


@pytest.mark.parametrize(("name", "backend"), [*itertools.product(BODIES, ("eager", "moebius"))])
def test_it_is_pythons(name, backend):
    (step, held), (plain, expected) = made(BODIES[name]), made(BODIES[name])
    captured = capture(step, backend=backend)
    for numbers in INPUTS:
        ours, theirs = told(captured, torch.tensor(numbers)), told(plain, torch.tensor(numbers))
        assert same(ours, theirs) or repr(ours) == repr(theirs)  # (NaN is not itself)
        assert held == expected


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_it_is_a_number_of_the_graph(name):
    captured = capture(made(BODIES[name])[0], backend="eager")
    for numbers in INPUTS[:3]:
        captured(torch.tensor(numbers))
    assert (stats(captured).graphs, stats(captured).breaks, stats(captured).misses) == (1, 0, 1)
