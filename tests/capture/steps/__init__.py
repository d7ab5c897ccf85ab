"""Generated training steps: whole programs of several calls, one thing changed between two, plain and captured."""
