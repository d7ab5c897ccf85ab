"""Operators on fakes, the graph that is written, autograd and optimizers in it. May import heap and what stands below
it."""
