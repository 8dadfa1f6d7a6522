"""python -m infinilm: the same command as infinilm."""

import sys

from infinilm.cli import main

sys.exit(main())
