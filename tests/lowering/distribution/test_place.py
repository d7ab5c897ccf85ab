"""The pass that spreads expert calls of a graph over ranks: its results, what it shards, what it leaves whole."""
from __future__ import annotations

import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.backends.registry import lookup_backend
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from moebius.kernels import experts
from moebius.lowering.distribution import (
    DistributionError,
    Plan,
    Sharded,
    average_gradients,
    collect_parameters,
    expected_bytes,
    input_conversions,
    parameters_to_place,
    place,
    place_parameters,
    to_graph_input,
    traffic,
)
from moebius.lowering.distribution.expert_parallel import combine, dispatch, own_experts
from moebius.lowering.graph import LoweringOptions

fx.wrap("experts")
T, K, D, N, E = 11, 2, 8, 6, 5


def route_tokens(x, router):
    weight, index = (x @ router.T).softmax(-1).topk(K)
    return index, weight


fx.wrap("route_tokens")


def plain(x, router, gate_up, down):
    index, weight = route_tokens(x, router)
    return (x + experts(x, gate_up, down, index, weight),)


def transposed(x, router, gate_up, down):  # weights kept the other way round, as gpt-oss keeps them
    index, weight = route_tokens(x, router)
    return (x + experts(x, gate_up.transpose(1, 2).contiguous(), torch.permute(down, (0, 2, 1)), index, weight),)


def used_elsewhere(x, router, gate_up, down):
    index, weight = route_tokens(x, router)
    return (x + experts(x, gate_up, down, index, weight) + gate_up.mean(),)


def computed_weights(x, router, gate_up, down):  # mixes experts, so no rank can do it alone
    index, weight = route_tokens(x, router)
    return (experts(x, gate_up, down.flip(0), index, weight),)


def twice(x, router, gate_up, down):
    index, weight = route_tokens(x, router)
    x = x + experts(x, gate_up, down, index, weight)
    index, weight = route_tokens(x, router)
    return (x + experts(x, gate_up, down, index, weight, "gelu"),)


def parameters(function):
    torch.manual_seed(0)
    shapes = [(E, D), (E, D, 2 * N), (E, N, D)] if function is transposed else [(E, D), (E, 2 * N, D), (E, D, N)]
    return [torch.nn.Parameter(torch.randn(*shape, dtype=torch.float64) / shape[-1] ** 0.5) for shape in shapes]


def captured(function, tensors, fakes=True):
    """A graph as capture hands it down: placeholders with fakes of whole tensors, and where the real ones are."""
    gm = fx.symbolic_trace(function)
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True))
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, tensor in zip(placeholders, tensors, strict=True):
        with mode:
            node.meta["val"] = torch.empty(tensor.shape, dtype=tensor.dtype).requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            node.meta |= {"tensor": weakref.ref(tensor), "source": f"L['model'].{node.name}", "static": True}

    class Propagate(fx.Interpreter):
        def run_node(self, node):
            value = super().run_node(node)
            node.meta["val"] = value
            node.meta["where"] = (__file__, 1, function.__name__)
            return value

    with mode:
        Propagate(gm).run(*[node.meta["val"] for node in placeholders])
    return gm


def targets(gm):
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def call(gm, options, inputs, run=None):
    conversions = input_conversions(gm, options)
    return (run or gm)(*(to_graph_input(v, how) for v, how in zip(inputs, conversions, strict=True)))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, Sharded) else tensor


def check_graph(name, placed, backend=None):
    function = globals()[name]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = LoweringOptions(mesh=mesh)
    params = parameters(function)
    reference = copy.deepcopy(params)
    x = torch.randn(T, D, dtype=torch.float64)

    gm = place(captured(function, [x, *params]), options)
    if placed:
        assert place_parameters(wanted := parameters_to_place(gm), mesh, gm.meta["plan"]) == wanted
        assert bool(wanted) == (gm.meta["plan"].ranks > 1)
        gm = place(captured(function, [x, *params]), options)
        assert parameters_to_place(gm) == []
    average_gradients([], params, mesh, gm.meta["plan"])
    run = None
    if backend:
        inputs = [to_graph_input(v, how) for v, how in zip([x, *params], input_conversions(gm, options), strict=True)]
        mode = next(node.meta["val"].fake_mode for node in gm.graph.nodes if node.op == "placeholder")
        with tracing(TracingContext(mode)):  # its ShapeEnv knows sizes that only the running graph has
            run = lookup_backend(backend)(gm, inputs)

    for _ in range(2):
        found = call(gm, options, [x, *params], run)[0]
        expected = function(x, *reference)[0]
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        found.sin().sum().backward()
        expected.sin().sum().backward()
    for mine, theirs in zip(params, reference, strict=True):
        assert isinstance(mine.grad, Sharded) == isinstance(mine, Sharded)
        torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-11, atol=1e-11)
    where = {node.meta.get("where") for node in gm.graph.nodes if node.target in (dispatch, combine)}
    assert where == {(__file__, 1, name)}
    return [isinstance(p, Sharded) for p in params], input_conversions(gm, options), targets(gm).count(own_experts)


def test_placed_experts(on_ranks):
    for sharded, conversions, taken in on_ranks(2, check_graph, "plain", True):
        assert sharded == [False, True, True]
        assert conversions == ["as is", "as is", "shard→local", "shard→local"]
        assert taken == 0


def test_before_placement_the_graph_is_right_too(on_ranks):
    for sharded, conversions, taken in on_ranks(2, check_graph, "plain", False):
        assert sharded == [False] * 3
        assert conversions == ["as is"] * 4
        assert taken == 2


def test_weights_that_are_transposed_in_the_graph(on_ranks):
    for sharded, conversions, taken in on_ranks(3, check_graph, "transposed", True):
        assert sharded == [False, True, True]
        assert conversions[2:] == ["shard→local", "shard→local"]
        assert taken == 0


def test_two_regions_share_their_weights(on_ranks):
    for _, conversions, taken in on_ranks(2, check_graph, "twice", True):
        assert conversions[2:] == ["shard→local", "shard→local"]
        assert taken == 0


@pytest.mark.parametrize(
    "name, sharded", [("used_elsewhere", [False, False, True]), ("computed_weights", [False, True, False])]
)
def test_a_weight_with_another_use_stays_whole(on_ranks, name, sharded):
    for found, _, taken in on_ranks(2, check_graph, name, True):
        assert found == sharded
        assert taken == 1


def check_placed_by_another_graph(name):
    """A parameter that one graph got placed is gathered for a graph that needs it whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = LoweringOptions(mesh=mesh)
    function = globals()[name]
    params = parameters(function)
    reference = copy.deepcopy(params)
    place_parameters(params[1:], mesh, Plan())
    x = torch.randn(T, D, dtype=torch.float64)
    gm = place(captured(function, [x, *params]), options)
    found, expected = call(gm, options, [x, *params])[0], function(x, *reference)[0]
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    found.sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(params, reference, strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-11, atol=1e-11)
    conversions = input_conversions(gm, options)
    del gm, found
    collect_parameters(params)
    for mine, theirs in zip(params, reference, strict=True):
        assert type(mine) is torch.nn.Parameter and torch.equal(mine, theirs)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-11)
    return conversions


def test_placed_parameter_that_a_graph_needs_whole(on_ranks):
    assert on_ranks(2, check_placed_by_another_graph, "used_elsewhere")[0][2:] == ["shard→full", "shard→local"]
    assert on_ranks(2, check_placed_by_another_graph, "computed_weights")[0][2:] == ["shard→local", "shard→full"]


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_foreign_backend(on_ranks, backend):
    on_ranks(2, check_graph, "plain", True, backend)


def check_other_mesh():
    ranks = dist.get_world_size()
    params = parameters(plain)
    reference = copy.deepcopy(params)
    x = torch.randn(T, D, dtype=torch.float64)
    place_parameters(params[1:], init_device_mesh("cpu", (ranks,)), Plan())
    options = LoweringOptions(mesh=init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "ep")))
    gm = place(captured(plain, [x, *params]), options)
    assert input_conversions(gm, options)[2:] == ["shard→full"] * 2 and parameters_to_place(gm) == []
    torch.testing.assert_close(call(gm, options, [x, *params])[0], plain(x, *reference)[0], rtol=1e-11, atol=1e-11)


def test_parameters_that_live_on_another_mesh(on_ranks):
    on_ranks(2, check_other_mesh)


def check_fakes():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = parameters(plain)
    x = torch.randn(T, D, dtype=torch.float64)
    place_parameters(params[1:], mesh, Plan())
    gm = place(captured(plain, [x, *params]), LoweringOptions(mesh=mesh))
    local = len(params[1].local)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    assert tuple(placeholders[2].meta["val"].shape) == (local, 2 * N, D)
    assert placeholders[2].meta["global_shape"] == (E, 2 * N, D)
    run = next(node for node in gm.graph.nodes if node.target is experts)
    rows = run.meta["val"].shape[0]
    assert not isinstance(rows, int) and run.meta["val"].shape[1] == D  # how many rows arrive is known at run time
    last = [node for node in gm.graph.nodes if node.target is combine][0]
    assert tuple(last.meta["val"].shape) == (T, D)


def test_fakes_follow(on_ranks):
    on_ranks(2, check_fakes)


def check_plan():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    params = parameters(twice)
    x = torch.randn(T, D, dtype=torch.float64)
    plan = place(captured(twice, [x, *params]), LoweringOptions(mesh=mesh)).meta["plan"]
    assert plan.parameters == {"L['model'].gate_up": (E, 3), "L['model'].down": (E, 3)}
    assert (plan.ranks, plan.axis, len(plan.regions)) == (2, "ep", 2)
    assert plan.expected().total == pytest.approx(2 * expected_bytes(plan.regions[0], 2).total)
    assert "2 expert regions" in str(plan) and "L['model'].down: 5 experts, at most 3 on a rank" in str(plan)

    torch.manual_seed(1)
    x = torch.randn(400, D, dtype=torch.float64)
    gm = place(captured(twice, [x, *params]), LoweringOptions(mesh=mesh))
    traffic.reset()
    call(gm, LoweringOptions(mesh=mesh), [x.requires_grad_(), *params])[0].sum().backward()
    return traffic.total, gm.meta["plan"].expected().total


def test_plan_and_what_a_call_really_sends(on_ranks):
    sent, expected = zip(*on_ranks(2, check_plan), strict=True)
    assert sum(sent) == pytest.approx(sum(expected), rel=0.15)


def check_meshes():
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    params = parameters(plain)
    x = torch.randn(T, D, dtype=torch.float64)
    gm = captured(plain, [x, *params])
    with pytest.raises(DistributionError, match="neither 'auto' nor"):
        place(gm, LoweringOptions(mesh=mesh, plan="fast"))
    with pytest.raises(DistributionError, match="'ep' is not in the mesh"):
        place(gm, LoweringOptions(mesh=mesh, plan=Plan(axis="ep")))
    unnamed = init_device_mesh("cpu", (1, ranks))
    with pytest.raises(DistributionError, match="none is called 'ep'"):
        place(gm, LoweringOptions(mesh=unnamed))
    named = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "ep"))
    assert dispatch in targets(place(captured(plain, [x, *params]), LoweringOptions(mesh=named)))
    tensor_parallel = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("ep", "tp"))
    with pytest.raises(DistributionError, match=r"'tp' \(\d ranks\) beside 'ep'"):
        place(gm, LoweringOptions(mesh=tensor_parallel))
    # over an axis of one rank there is nothing to spread
    alone = LoweringOptions(mesh=named["dp"])
    assert dispatch not in targets(place(captured(plain, [x, *params]), alone))


def test_meshes_and_plans_that_do_not_fit(on_ranks):
    on_ranks(2, check_meshes)
