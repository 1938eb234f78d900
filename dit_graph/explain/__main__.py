"""Runs `python -m dit_graph.explain MODEL`."""

import sys

from dit_graph.cli.explain import main

if __name__ == "__main__":
    sys.exit(main())
