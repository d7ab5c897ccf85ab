"""Tensor checks, by attributes and by memory: both must give the same answers."""

import gc
import os
import time
import weakref

import pytest

torch = pytest.importorskip("torch")

import moebius  # noqa: E402
from moebius.hook import GuardProgram, calibrate_tensors, features, read_tensors_by_attributes  # noqa: E402
from moebius.torch_facts.torch_memory import tensor_samples  # noqa: E402

LIBRARY = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")


@pytest.fixture(params=["attributes", "memory"])
def reading(request):
    before = features()["tensor_reading"]
    read_tensors_by_attributes()
    if request.param == "memory":
        assert calibrate_tensors(LIBRARY, *tensor_samples()) is None
    assert features()["tensor_reading"] == request.param
    yield request.param
    read_tensors_by_attributes()
    if before == "memory":
        calibrate_tensors(LIBRARY, *tensor_samples())


def meta_of(t, **changes):
    meta = {
        "type": type(t),
        "dtype": t.dtype,
        "device": t.device,
        "layout": t.layout,
        "shape": tuple(t.shape),
        "stride": t.stride(),
        "storage_offset": t.storage_offset(),
        "requires_grad": t.requires_grad,
        "is_leaf": t.is_leaf,
        "is_conj": t.is_conj(),
        "is_neg": t.is_neg(),
        "is_inference": t.is_inference(),
    }
    return meta | changes


def program(meta):
    return GuardProgram(1, (), [("arg", 0)], [("tensor", 0, meta)])


def base():
    return torch.arange(12.0).reshape(3, 4)


def inference_tensor():
    with torch.inference_mode():
        return base()


CHANGES = {
    "dtype": lambda: base().double(),
    "dtype of the same width": lambda: base().to(torch.int32),
    "device": lambda: base().to("meta"),
    "shape": lambda: base().reshape(4, 3),
    "ndim": lambda: base().reshape(3, 4, 1),
    "flat": lambda: base().reshape(12),
    "stride": lambda: torch.arange(12.0).reshape(4, 3).t(),
    "storage_offset": lambda: torch.arange(13.0)[1:].reshape(3, 4),
    "requires_grad": lambda: base().requires_grad_(),
    "not a leaf": lambda: base().requires_grad_() * 2,
    "Parameter": lambda: torch.nn.Parameter(base()),
    "Parameter without grad": lambda: torch.nn.Parameter(base(), requires_grad=False),
    "conj": lambda: base().to(torch.complex64).conj(),
    "neg": lambda: torch._neg_view(base()),
    "inference": inference_tensor,
    "sparse": lambda: base().to_sparse(),
    "no tensor": lambda: 5,
    "None": lambda: None,
    "a subclass": lambda: base().as_subclass(type("Sub", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_noticed(reading, change):
    p = program(meta_of(base()))
    for _ in range(3):
        assert p.check((base(),))
    for _ in range(3):
        assert not p.check((CHANGES[change](),))
        assert p.check((base(),))


MADE = {k: v for k, v in CHANGES.items() if k not in ("no tensor", "None", "a subclass", "sparse")}


@pytest.mark.parametrize("kind", MADE)
def test_each_kind_passes_its_own_check_and_no_other(reading, kind):
    p = program(meta_of(MADE[kind]()))
    for _ in range(3):
        assert p.check((MADE[kind](),))
    for other in MADE:
        assert p.check((MADE[other](),)) == (other == kind), other
    assert not p.check((base(),))


def test_fields_that_are_not_given_may_change(reading):
    p = program({"type": torch.Tensor})
    for make in (base, CHANGES["dtype"], CHANGES["shape"], CHANGES["requires_grad"], CHANGES["device"]):
        assert p.check((make(),))
    p = program({"dtype": torch.float32, "shape": None})
    for _ in range(3):
        assert p.check((base(),))
        assert p.check((CHANGES["Parameter"](),))
        assert not p.check((CHANGES["dtype"](),))


def test_sizes_and_strides_that_may_vary(reading):
    p = program(meta_of(base(), shape=(None, 4), stride=(None, 1)))
    for n in (1, 3, 7, 0):
        assert p.check((torch.zeros(n, 4),))
    assert p.check((torch.zeros(3, 8)[:, :4],))
    assert not p.check((torch.zeros(4, 5),))
    assert not p.check((torch.zeros(4),))
    assert not p.check((torch.zeros(5, 3).t()[:, :4],))


def test_changes_in_place(reading):
    t = base()
    p = GuardProgram(0, (), [], [("static_tensor", t, meta_of(t))])
    for _ in range(3):
        assert p.check(())
    t.requires_grad_()
    assert not p.check(())
    t.requires_grad_(False)
    assert p.check(())
    t.data = torch.zeros(3, 4).double()
    assert not p.check(())
    t.data = torch.zeros(3, 4)
    assert p.check(())
    t.data = torch.zeros(4, 3).t()
    assert not p.check(())
    t.data = torch.zeros(3, 4)
    t.t_()
    assert not p.check(())
    t.t_()
    assert p.check(())
    t.resize_(2, 4)
    assert not p.check(())
    t.resize_(3, 4)
    assert p.check(())
    t.set_(torch.zeros(20).untyped_storage(), 2, (3, 4), (4, 1))
    assert not p.check(())
    torch.utils.swap_tensors(t, torch.zeros(3, 5))
    assert not p.check(())
    torch.utils.swap_tensors(t, torch.zeros(3, 4))
    assert p.check(())


def test_a_parameter_that_gets_a_gradient_still_passes(reading):
    layer = torch.nn.Linear(4, 2)
    p = GuardProgram(0, (), [], [("static_tensor", x, meta_of(x)) for x in layer.parameters()])
    for _ in range(3):
        assert p.check(())
        layer(torch.ones(3, 4)).sum().backward()
        torch.optim.SGD(layer.parameters(), 0.1).step()
    layer.weight.requires_grad_(False)
    assert p.explain(()) == 0
    layer.weight.requires_grad_(True)
    assert p.explain(()) is None
    layer.double()
    assert p.explain(()) == 0
    layer.float()
    layer.bias.data = torch.zeros(3)
    assert p.explain(()) == 1


def test_results_that_require_grad(reading):
    w = torch.nn.Parameter(base())
    p = program(meta_of(w * 2))
    for _ in range(3):
        assert p.check((w * 2,))
        with torch.no_grad():
            assert not p.check((w * 2,))
        assert not p.check((base(),))
    view = w.view(12)
    p = program(meta_of(view))
    for _ in range(3):
        assert p.check((w.view(12),))
        assert not p.check((w.detach().view(12),))
    p = program(meta_of(w.detach().view(12)))
    for _ in range(3):
        assert p.check((w.detach().view(12),))
        assert not p.check((w.view(12),))


def test_fake_tensors_are_told_from_real_ones(reading):
    from torch._subclasses.fake_tensor import FakeTensorMode

    p = program(meta_of(base()))
    assert p.check((base(),))
    with FakeTensorMode():
        fake = torch.zeros(3, 4)
    assert not p.check((fake,))


@pytest.mark.parametrize(
    ("meta", "error"),
    [
        ({"type": 5}, TypeError),
        ({"shape": [1]}, TypeError),
        ({"shape": (1,), "stride": (1, 1)}, ValueError),
        ({"shape": ("x",)}, TypeError),
        ({"nonsense": 1}, ValueError),
        ([], TypeError),
    ],
)
def test_bad_meta_is_refused(meta, error):
    with pytest.raises(error):
        program(meta)


def test_calibration_refuses_what_it_cannot_find():
    before = features()["tensor_reading"]
    good, toggles = tensor_samples()
    try:
        assert "not loaded" in calibrate_tensors("/nowhere/libtorch_cpu.so", good, toggles)
        assert "too few" in calibrate_tensors(LIBRARY, good[:1], toggles)
        wrong = [(t, address, bits ^ (1 << 40)) for t, address, bits in good]
        assert "key set" in calibrate_tensors(LIBRARY, wrong, toggles)
        swapped = [(a[0], b[1], b[2]) for a, b in zip(good, good[1:] + good[:1], strict=True)]
        assert "TensorImpl" in calibrate_tensors(LIBRARY, swapped, toggles)
        assert features()["tensor_reading"] == "attributes"
        with pytest.raises(TypeError):
            calibrate_tensors(LIBRARY, [1, 2], toggles)
    finally:
        if before == "memory":
            calibrate_tensors(LIBRARY, *tensor_samples())


def test_programs_made_before_calibration_use_it_after():
    read_tensors_by_attributes()
    p = program(meta_of(base()))
    assert p.check((base(),))
    assert calibrate_tensors(LIBRARY, *tensor_samples()) is None
    try:
        assert p.check((base(),))
        assert p.check((base(),))
        assert not p.check((CHANGES["dtype"](),))
    finally:
        read_tensors_by_attributes()
    assert p.check((base(),))
    assert not p.check((CHANGES["dtype"](),))


def test_no_growth(reading, growth):
    t, other = base(), base().double()
    p = program(meta_of(t))

    def run():
        p.check((t,))
        p.check((other,))
        program(meta_of(t, shape=(None, 4)))

    assert growth(run, 2000) == 0


def test_tensors_are_let_go():
    t = base()
    p = GuardProgram(1, (), [("weak", t), ("arg", 0)], [("tensor", 0, meta_of(t)), ("is_weak", 1, t)])
    assert p.check((t,))
    ref = weakref.ref(t)
    del t
    gc.collect()
    assert ref() is None
    assert not p.check((base(),))


def test_memory_is_at_least_five_times_as_fast_as_attributes():
    tensors = [torch.nn.Parameter(torch.zeros(3, 4)) for _ in range(50)]
    p = GuardProgram(0, (), [], [("static_tensor", t, meta_of(t, is_leaf=None)) for t in tensors])

    def best():
        assert p.check(())
        smallest = float("inf")
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(50):
                p.check(())
            smallest = min(smallest, time.perf_counter() - start)
        return smallest

    read_tensors_by_attributes()
    slow = best()
    calibrate_tensors(LIBRARY, *tensor_samples())
    try:
        fast = best()
    finally:
        read_tensors_by_attributes()
    assert slow / fast > 5, slow / fast


def test_swapped_between_steps_after_a_reset():
    layer, x, other = torch.nn.Linear(3, 3), torch.ones(2, 3), torch.nn.Parameter(torch.full((3, 3), 7.0))
    step = moebius.capture(lambda layer, x: layer(x).sum(), backend="eager")
    assert [step(layer, x) for _ in range(2)] == [layer(x).sum()] * 2
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(layer.weight, other)
    moebius.reset()
    gc.collect()
    torch.utils.swap_tensors(layer.weight, other)
    assert step(layer, x) == layer(x).sum() and (layer.weight == 7.0).all()
