"""moebius.kernels.native: the CPU form's row work in C, its loop over experts, and the order of slots. Here live the C
sources of one extension, ``rows``, and its only caller, panel_work.py, which falls to torch's operators where the
extension is missing or does not know a dtype or an activation. C code here knows addresses, sizes and threads; it
includes Python.h and no torch, whose products it calls through the C interface that compiled models call."""
