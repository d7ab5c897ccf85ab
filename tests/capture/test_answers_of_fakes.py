"""What a step is told of a tensor that it has made: each question that torch.Tensor has a name for, of tensors of many
kinds, is answered as plain Python answers it, whatever the fake tensor of the trace would say."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F

import moebius
from moebius import capture, explain

INDICES = torch.tensor([[0, 1, 1], [2, 0, 0]])
KINDS = {
    "dense": lambda x_TD: x_TD * 1,
    "a view": lambda x_TD: x_TD[1:, 1],
    "conjugate": lambda x_TD: torch.complex(x_TD, x_TD).conj(),
    "negative": lambda x_TD: torch.complex(x_TD, x_TD).conj().imag,
    "sparse": lambda x_TD: x_TD.relu().to_sparse(),
    "compressed": lambda x_TD: x_TD.relu().to_sparse_csr(),
    "sparse, of indices": lambda x_TD: torch.sparse_coo_tensor(INDICES, x_TD[0], (2, 3)),
    "quantised": lambda x_TD: torch.quantize_per_tensor(x_TD, 0.1, 0, torch.quint8),
    "rows that data chose": lambda x_TD: x_TD[x_TD[:, 0] > 0],
    "integers": lambda x_TD: x_TD.long(),
    "one number": lambda x_TD: x_TD.sum() * 3,
    "one integer": lambda x_TD: (x_TD * 5).long().sum(),
    "empty": lambda x_TD: x_TD[:0],
    "for oneDNN": lambda x_TD: x_TD.to_mkldnn(),
    "without memory": lambda x_TD: x_TD.to("meta"),
}
# What reaches outside of the tensor, gives addresses, or belongs to other devices.
NOT_ASKED = frozenset(
    "cuda xpu ipu hpu mtia backward share_memory_ register_hook _typed_storage storage data_ptr const_data_ptr _cdata"
    " map_ map2_ pin_memory grad_fn untyped_storage _backward_hooks _post_accumulate_grad_hooks module_load wait"
    " _grad_fn register_post_accumulate_grad_hook _has_symbolic_sizes_strides _make_subclass"
    " _sparse_mask_projection".split()
)
SPECIAL = frozenset("__len__ __bool__ __repr__ __int__ __float__ __index__ __complex__ __iter__".split())
# Of these the dense tensor that they give tells how many entries there are.
PARTS = frozenset("values indices _values _indices crow_indices col_indices coalesce to_dense".split())


def asked(tensor: torch.Tensor, name: str) -> object:
    value = getattr(tensor, name)
    if callable(value):
        value = value()
    return list(value) if name == "__iter__" else value


def questions(make) -> list[str]:
    """Attributes, and methods without arguments, that answer with something other than a tensor."""
    found = []
    for name in dir(torch.Tensor):
        if name in NOT_ASKED or (name.startswith("__") and name not in SPECIAL):
            continue
        try:
            answer = asked(make(torch.linspace(-1, 2, 6).view(2, 3)), name)
        except Exception:
            continue
        if name in PARTS or not isinstance(answer, torch.Tensor):
            found.append(name)
    return found


def told(step, x_TD: torch.Tensor) -> str:
    try:
        return str(step(x_TD))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")  # (torch's, of what is deprecated or in beta)
def test_questions_are_answered_as_plain_python_does(kind):
    make, wrong = KINDS[kind], []
    x_TD = torch.tensor([[0.5, -1.25, 2.0], [-0.75, 0.25, 1.5]])
    for name in questions(make):

        def step(x_TD, name=name):
            return asked(make(x_TD), name)

        captured = capture(step, backend="eager")
        batches = [x_TD, -x_TD, x_TD.abs(), x_TD]
        if (ours := [told(captured, x) for x in batches]) != (plain := [told(step, x) for x in batches]):
            wrong.append((name, ours, plain))
        moebius.reset()
    assert wrong == []


def test_operators_on_sparse_tensors_that_give_dense_ones_stay_in_the_graph():
    def step(x_TD):
        sparse = x_TD.relu().to_sparse()
        return sparse @ torch.ones(3, 2), sparse.t().to_dense(), sparse.shape, torch.sparse.sum(sparse).item()

    x_TD = torch.tensor([[0.5, -1.25, 2.0], [-0.75, 0.25, 1.5]])
    report = explain(step, backend="eager")(x_TD)
    assert str(report.result) == str(step(x_TD)) and report.breaks == []


def test_quantised_numbers_are_known_by_their_names():
    kinds = {kind for kind in vars(torch).values() if type(kind) is torch.dtype}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = {kind for kind in kinds if torch.empty(0).new_empty(0, dtype=kind).is_quantized}
    assert quantised == moebius.tensors.fakes.QUANTISED


IN_PLACE = [name for name, function in vars(F).items() if inspect.isfunction(function) and not name.startswith("_")
            and "inplace" in inspect.signature(function).parameters]  # fmt: skip


@pytest.mark.share(25)
@pytest.mark.parametrize("asks", [True, 1, 2.0, "yes", False, 0, None, ""], ids=repr)
@pytest.mark.parametrize("name", IN_PLACE)
def test_whatever_is_true_asks_for_a_result_in_place(name, asks):
    function = getattr(F, name)
    required = [p for p in inspect.signature(function).parameters.values() if p.default is inspect.Parameter.empty]
    given = (0.25, 0.5)[: len(required) - 1]

    def step(x_TD):
        y_TD = x_TD * 1
        torch.manual_seed(5)
        returned = function(y_TD, *given, inplace=asks)
        return y_TD, returned, returned is y_TD

    x_TD = torch.linspace(-2, 2, 6).view(2, 3)
    captured = capture(step, backend="eager")
    for _ in range(2):
        assert told(captured, x_TD) == told(step, x_TD)


MADE_OF = {"int": lambda n: n, "float": lambda n: n * 0.5, "comparison": lambda n: n > 1}


@pytest.mark.share(8)
@pytest.mark.parametrize("made", MADE_OF)
@pytest.mark.parametrize("name", IN_PLACE)
def test_numbers_that_vary_ask_for_a_result_in_place_where_they_are_true(name, made):
    function = getattr(F, name)
    required = [p for p in inspect.signature(function).parameters.values() if p.default is inspect.Parameter.empty]
    given = (0.25, 0.5)[: len(required) - 1]

    def step(x_TD, number):
        y_TD = x_TD * 1
        torch.manual_seed(5)
        returned = function(y_TD, *given, inplace=MADE_OF[made](number))
        return y_TD, returned, returned is y_TD

    x_TD = torch.linspace(-2, 2, 6).view(2, 3)
    captured = capture(step, backend="eager")
    for number in (1, 1, 2, 0, 2, 1, 0, 3):
        assert str(captured(x_TD, number)) == str(step(x_TD, number))
