"""`python -m flashstate` is the console script `flashstate`."""

import sys

from flashstate.cli import main

if __name__ == "__main__":
    sys.exit(main())
