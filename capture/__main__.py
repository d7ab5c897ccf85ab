"""``python -m moebius``: the same as the ``moebius`` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
