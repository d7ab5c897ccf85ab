"""Every MoE family of transformers, tiny, trained for three whole steps, captured and plain: ``make zoo``.

What may live here: how the tiny models are built (tiny.py), the step and what is measured of it (measure.py), the page
docs/zoo.md that is made of the results (page.py), and ``python -m zoo`` (``__main__.py``), one process a family.
"""
