"""Costs of plans and the search: against the bytes that the step sends, what the operator saves, and each other."""
from __future__ import annotations

from dataclasses import replace

import pytest

from moebius.kernels.contract import saved_elements
from moebius.lowering.planner import PlannerError, hardware, routing, search, shapes
from moebius.lowering.planner.costs import Predictor
from moebius.lowering.planner.memory import experts_saved
from moebius.lowering.planner.plans import Candidate, Job
from moebius.lowering.planner.traffic import RegionShape, expected_bytes
from moebius.lowering.planner.work import attention_products


def job(model="qwen3-30b-a3b", gpus=64, gpu="h200", nodes=None, per_gpu=8, **options) -> Job:
    shape = shapes.named(model)
    cluster = hardware.cluster(hardware.device(gpu), gpus, nodes)
    routed = options.pop("routing", routing.Routing(shape.experts, shape.top_k, shape.groups, shape.group_limit))
    return Job(shape, cluster, per_gpu * gpus, options.pop("sequence", 4096), routed, **options)


def term(cost, name):
    return sum(one.seconds for one in cost.terms if one.name == name)


@pytest.mark.parametrize("nodes", [1, 2])
def test_exchanges_are_the_bytes_that_the_step_sends(nodes):
    """The same formula that tests hold equal to what ranks really send, over the slowest link."""
    work = job(gpus=8, nodes=nodes, per_gpu=1)
    cost = Predictor(work).cost(Candidate(1, 8, 1, "bf16"))
    shape, device = work.shape, work.cluster.device
    sent = expected_bytes(RegionShape(4096, shape.top_k, shape.experts, shape.width, 2, 4), 8)
    share, rate = (1.0, device.near_rate * 0.8) if nodes == 1 else (4 / 7, device.far_rate * 0.9)
    start = (device.reached.near_start if nodes == 1 else device.reached.far_start) + 7 * device.reached.peer_start
    expected = shape.layers * (4 * start + (sent.dispatch + sent.combine) * share / rate)
    assert term(cost, "dispatch") + term(cost, "combine") == pytest.approx(expected)


@pytest.mark.parametrize("save", ["default", "fp8", "recompute"])
def test_experts_save_what_the_operator_says(save):
    work = job(gpus=1, per_gpu=1, gpu="b200")
    shape, tokens, b = work.shape, 4096, 2
    ours = experts_saved(work, Candidate(1, 1, 1, "bf16", save), tokens, tokens * shape.top_k)
    x = tokens * shape.width
    every = saved_elements(tokens, shape.width, shape.expert_width, shape.top_k, save=save)
    kept = every - x - 2 * tokens * shape.top_k
    routed = tokens * shape.top_k * 12 + tokens * shape.experts * 4
    assert ours - routed == pytest.approx(kept * (1 if save == "fp8" else b), rel=0.01)


def test_what_runs_is_what_moebius_does_today():
    found = search.search(job())
    assert found.running and found.later
    for cost in found.running:
        plan = cost.plan
        assert cost.fits and (plan.shard, plan.level, plan.once) == ("none", "rank", False)
    assert all(cost.fits and cost.plan.missing() for cost in found.later)
    assert len(found.running) + len(found.later) + len(found.too_large) == found.tried


@pytest.mark.parametrize("change", [{"shard": "optimizer"}, {"shard": "all"}, {"level": "node"}, {"level": "slot"},
                                    {"once": True}])
def test_each_thing_that_is_not_there_is_named(change):
    assert Candidate(1, 8, 1, "bf16").missing() == Candidate(1, 8, 1, "bf16", chunks=2).missing() == ()
    assert len(replace(Candidate(1, 8, 1, "bf16"), **change).missing()) == 1


def test_the_step_is_its_parts():
    for cost in search.search(job(gpus=16)).running:
        parts = cost.seconds("products") + cost.seconds("memory") + cost.exposed
        assert cost.step == pytest.approx(parts)
        assert cost.plan.chunks > 1 or cost.exposed == pytest.approx(cost.seconds("communication"))


def test_attention_goes_back_in_five_products_for_two():
    """What it takes beyond a sequence of one token, whose attention is nothing, is 3.5 times forward's."""
    times = {}
    for sequence in (1, 4096):
        one = job("mixtral-8x7b", gpus=1, per_gpu=4096 // sequence, sequence=sequence)
        times[sequence] = term(Predictor(one).cost(Candidate(1, 1, 4096 // sequence, "bf16")), "attention")
        itself = attention_products(one, 4096.0)[1]
        forward = itself.seconds(one.cluster.device, "bf16") * one.shape.layers
        times[sequence] -= 3.5 * forward
    assert times[1] == pytest.approx(times[4096]) and times[1] > 0


def test_chunks_pay_for_their_starts_and_hide_what_their_schedule_hides():
    predictor = Predictor(job())
    plain, half = (predictor.cost(Candidate(4, 16, 2, "bf16", chunks=chunks)) for chunks in (1, 2))
    assert half.seconds("communication") > plain.seconds("communication")
    assert half.exposed < plain.exposed and half.exposed > half.seconds("communication") - sum(
        term(half, name) for name in ("dispatch", "combine"))
    assert term(half, "gradients averaged") == term(plain, "gradients averaged")


def test_what_is_hidden_is_never_more_than_what_there_is():
    for cost in search.search(job(gpus=16)).later:
        assert 0 <= cost.exposed <= cost.seconds("communication") + 1e-12
        assert cost.step >= max(cost.seconds("products") + cost.seconds("memory"), cost.seconds("communication") * 0)


def test_the_best_of_a_faster_network_is_no_slower():
    work = job()
    fast = replace(work.cluster, device=hardware.with_network(work.cluster.device, 400e9))
    assert search.search(replace(work, cluster=fast)).running[0].step < search.search(work).running[0].step


def test_a_copy_for_each_node_sends_less_between_nodes():
    predictor = Predictor(job())
    plain, node = (predictor.cost(Candidate(1, 64, 2, "bf16", level=level)) for level in ("rank", "node"))
    assert term(node, "dispatch") < term(plain, "dispatch")


def test_one_copy_for_each_rank_is_never_more_than_one_for_each_slot():
    predictor = Predictor(job())
    for expert in (2, 8, 64):
        rank, slot = (predictor.cost(Candidate(64 // expert, expert, 2, "bf16", level=level))
                      for level in ("rank", "slot"))
        assert term(rank, "dispatch") <= term(slot, "dispatch")


def test_skewed_routing_costs_time_and_memory():
    even, plan = job(), Candidate(8, 8, 2, "bf16")
    counts = [1 / (e + 1) for e in range(128)]
    skewed = replace(even, routing=routing.from_counts([counts], 8))
    a, b = Predictor(even).cost(plan), Predictor(skewed).cost(plan)
    assert term(b, "experts") > 2 * term(a, "experts")
    assert b.memory.saved > a.memory.saved


@pytest.mark.parametrize("save", ["recompute", "layers"])
def test_running_again_trades_time_for_memory(save):
    predictor = Predictor(job())
    plain, again = (predictor.cost(Candidate(8, 8, 2, "bf16", kept)) for kept in ("default", save))
    assert again.memory.total < plain.memory.total and again.step > plain.step


def test_what_is_split_takes_less_of_each_rank():
    predictor = Predictor(job())
    none, states, everything = (predictor.cost(Candidate(8, 8, 1, "bf16", shard=shard)).memory
                                for shard in ("none", "optimizer", "all"))
    assert none.optimizer > states.optimizer == everything.optimizer
    assert none.weights == states.weights > everything.weights


@pytest.mark.parametrize("running", [True, False])
def test_the_smallest_cluster_fits_and_a_smaller_one_does_not(running):
    work = job("qwen3-30b-a3b", gpus=1, gpu="h100")
    cluster = search.smallest(work, running)
    assert cluster is not None and cluster.ranks > 1
    half = hardware.cluster(work.cluster.device, cluster.ranks // 2)
    assert search.lightest(replace(work, cluster=cluster, batch=cluster.ranks), running).fits
    assert not search.lightest(replace(work, cluster=half, batch=half.ranks), running).fits


def test_nothing_fits_where_what_is_whole_is_too_large():
    work = job("deepseek-v3", gpus=8, gpu="h100")
    assert not search.search(work).running
    assert search.smallest(work, running=True) is None
    assert search.smallest(work, running=False).ranks > 64


def test_the_next_best_loses_by_what_is_said():
    first, second = search.simplest(search.search(job()).running)[:2]
    assert second.step >= first.step
    said = search.why(second, first)
    name = max({t.name for t in second.terms}, key=lambda name: term(second, name) - term(first, name))
    assert said.startswith(name)


@pytest.mark.parametrize("change, said", [({"batch": 100}, "64 or 128"), ({"batch": 3}, ": 64"),
                                          ({"sequence": 0}, "seq")])
def test_a_job_that_cannot_be_is_refused(change, said):
    with pytest.raises(PlannerError, match=said):
        Predictor(replace(job(), **change))
