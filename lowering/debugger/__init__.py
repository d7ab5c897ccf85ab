"""One terminal for the ranks of a job: ``moebius debug``. The debugger is Python's own (``pdb``), one in each rank.
What may live here is how a terminal reaches them: rank.py is in each process of the job, terminal.py and command.py in
the terminal's, wire.py is between them, sockets in a folder that only their user can open. Plain Python, but for what a
rank says of tensors (values.py) and of its groups' timeouts.
"""
