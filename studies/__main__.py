"""python -m studies NAME ...: repeats a measurement, and prints its table."""

import sys

from studies.harness import main

sys.exit(main())
