"""The captured function: what was captured for it, when it is captured again, what it keeps alive and what a failed
guard teaches. May import every room below: trace, codegen, regions, python, tensors, heap, values, bytecode, guards,
torch_facts, hook."""
