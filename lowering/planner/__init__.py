"""What a training step of an MoE model would cost on a cluster, without running it, and which way of running it costs
least. What may live here: shapes of models (models.py, shapes.py), figures of devices (hardware.py), formulas for
routing, bytes, collectives, work and memory, and the search over plans. Plain Python: nothing here imports torch (only
calibrate.py, when it measures), and nothing of moebius but this folder. lowering/distribution counts bytes with the
same formulas (traffic.py).

    shape = shapes.named("qwen3-30b-a3b")
    found = search.search(Job(shape, cluster, batch=512, sequence=4096))
"""
from moebius.lowering.planner.errors import PlannerError
