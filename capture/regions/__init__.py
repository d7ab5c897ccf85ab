"""Parts of the step that are graphs of their own, or are seen again: loops, branches, autograd functions, checkpoints,
hooks, equal modules. May import python and what stands below it."""
