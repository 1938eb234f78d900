"""Runs `python -m dit_graph.prefill`."""

import sys

from dit_graph.cli.prefill import main

if __name__ == "__main__":
    sys.exit(main())
