"""Draw gain against image tokens from records of `python -m dit_graph.bench --output NAME`.

python benchmarks/crossover.py benchmarks/results/*_h200_*.json --output crossover.png
"""

import argparse
import json
from pathlib import Path

from dit_graph.bench.chart import crossover


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD.json")
    parser.add_argument("--mode", default="breakable", help="the variant (default breakable)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.png")
    args = parser.parse_args()
    results = [json.loads(path.read_text()) for path in args.records]
    crossover(results, args.output, args.mode)


if __name__ == "__main__":
    main()
