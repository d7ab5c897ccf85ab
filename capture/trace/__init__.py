"""One attempt at capture: the machine over a frame, where it restarts and with which assumptions, and the way from a
finished trace to a segment. May import codegen and what stands below it."""
