"""Shadow mode: one in n captured calls is also run as plain Python, on copies, and the two are compared.

What may live here: copying everything that a call reaches, comparing two runs, and finding the first operator whose
result differs. Nothing here decides what is captured.
"""

from .shadow import Shadow

__all__ = ["Shadow"]
