"""The image's HEALTHCHECK: whether the router of this container answers.

``LOCKSTEP_HEALTH_URL`` names another address than that of the default port. ``serve`` watches instances and
the coordinator by itself and ends when it cannot serve, so headless containers turn the check off.
"""

from __future__ import annotations

import os
import sys
import urllib.request

DEFAULT_URL = "http://127.0.0.1:8000/livez"
TIMEOUT = 4.0


def main() -> int:
    url = os.environ.get("LOCKSTEP_HEALTH_URL", DEFAULT_URL)
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT):
            return 0
    except OSError as error:
        print(f"no answer from {url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
