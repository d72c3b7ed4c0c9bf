"""``python -m edgefl`` is the ``edgefl`` command."""

from __future__ import annotations

import sys

from edgefl.cli import main

if __name__ == "__main__":
    sys.exit(main())
