"""Small generated programs, plain and captured: graph breaks in loops and handlers; names that are given anew; branches
and loops that values decide."""
