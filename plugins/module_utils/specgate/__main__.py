"""``python3 -m specgate``."""

import sys

from .cli import main

sys.exit(main())
