"""Runs `python -m dit_graph.generate`."""

import sys

from dit_graph.cli.generate import main

if __name__ == "__main__":
    sys.exit(main())
