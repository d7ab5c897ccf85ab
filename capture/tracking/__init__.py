"""The tracking domain: what a value is while a frame is captured.

Values are the Python objects themselves, with two exceptions: a tensor is a ``TensorProxy`` (``values``), and a
container that existed before the call is read and written through an overlay (``objects``), so that tracing touches
nothing of the user's. ``domain`` gives the machine its operations; ``attributes``, ``calls``, ``natives`` and
``tensors`` hold the operations' families; ``loops`` turns a loop over a tensor's rows into one node.
"""
