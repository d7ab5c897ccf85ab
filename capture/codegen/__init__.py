"""The residual program: code that loads, calls the graph, replays effects, rebuilds objects, and goes on after a graph
break. May import regions and what stands below it."""
