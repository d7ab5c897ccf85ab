"""A captured step as a file: written by ``captured.export(path)``, run by ``moebius.load(path)``.

May live here: the file's format and its checks (archive, values, graphs, operators, relations), what writes one from a
finished capture (residual, world, write) and what runs one (load). The loading half imports no tracing, no guards' C
code and no interpreter: a file runs where nothing can be captured.
"""
