"""python -m eagle_tools.bench: the same as eagle-bench."""

import sys

from eagle_tools.bench import main

sys.exit(main())
