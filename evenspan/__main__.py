"""`python -m evenspan`: the command line, as each launched rank starts it."""

import sys

from evenspan.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
