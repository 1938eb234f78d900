"""Runs `python -m dit_graph.bench`."""

import sys

from dit_graph.bench.options import main

if __name__ == "__main__":
    sys.exit(main())
