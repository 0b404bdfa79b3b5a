"""``python -m router.tools.autoscale``."""

import sys

from router.tools.autoscale.command import main

if __name__ == "__main__":
    sys.exit(main())
