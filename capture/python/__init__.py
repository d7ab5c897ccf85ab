"""Python's operations on traced values: attributes, items, calls, operators, builtins and the libraries' functions. May
import tensors and what stands below it."""
