"""python -m eagle_tools.precision: the command."""

import sys

from eagle_tools.precision.cli import main

if __name__ == "__main__":
    sys.exit(main())
