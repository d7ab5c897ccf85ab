"""What existed before the step: objects, cells, classes and iterators, how they are read under guards, and what is
written to them without touching them. May import values and what stands below it."""
