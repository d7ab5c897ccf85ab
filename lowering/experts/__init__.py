"""Expert loops: what proves that a loop is a layer of routed experts, and what replaces it. Here live the algebra of
facts (facts.py), the reader that derives them from a loop body (reader.py, with its rules in rules_*.py), the steps of
the proof (proof.py) and the pass that rewrites the graph (rewrite.py). What is no loop is put into the form of one
first: iterations one after another (unrolled_loops.py, module_reuse.py), experts on all tokens (dense.py), batched
products (batched.py, batched_iterations.py, by the axes of layout.py; zero_rows.py). What a branch runs is gone through
in the same way (nested.py). Nothing here looks at how a line
was spelled: new front ends are new rules that lead to the same facts."""
