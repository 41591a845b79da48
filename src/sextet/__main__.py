"""Lets ``python -m sextet`` stand for the command ``sextet``."""

import sys

from sextet.cli import main

sys.exit(main())
