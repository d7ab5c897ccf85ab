"""Guards: the facts that a captured graph relies on.

While a frame is traced, ``recorder`` collects each fact that was read (source, check, the user's line). ``program``
turns the collection into one flat program that the C extension runs on each warm call, and says which fact failed.
"""
