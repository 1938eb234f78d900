"""`python -m dit_graph.bench`."""

import sys

from dit_graph.cli.bench import main

if __name__ == "__main__":
    sys.exit(main())
