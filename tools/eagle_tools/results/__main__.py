"""python -m eagle_tools.results."""

import sys

from eagle_tools.results import main

sys.exit(main())
