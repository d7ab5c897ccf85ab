"""C: frames that C code begins beneath the machine, handed back to it (reentry.c); what objects are, without asking
their Python code (objects.c); how much room the C stack has (room.c). Imports nothing of ours."""
