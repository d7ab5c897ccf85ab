"""CPython's own tests, run by the interpreter: the worker (one module, one process), the comparison with native, docs.

modules.py names the modules, worker.py runs one of them, run.py compares and writes docs/semantics.md, reasons.toml
says why a difference is there.
"""
