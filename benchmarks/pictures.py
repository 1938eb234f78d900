"""Put records of `python -m dit_graph.bench` together, such as those of `benchmarks/pictures.sh`.

    python benchmarks/pictures.py FOLDER/pictures-*.json --output benchmarks/results/pictures_h200

writes NAME.json (the records), NAME.md (a line a scenario, then every table) and NAME.png (gain
against image tokens, or with --bars the time of every variant).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from dit_graph.bench.chart import crossover, draw
from dit_graph.bench.table import markdown, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD.json")
    parser.add_argument("--mode", default="breakable", help="the variant (default breakable)")
    parser.add_argument("--bars", action="store_true", help="draw a bar a variant")
    parser.add_argument("--output", type=Path, required=True, metavar="NAME")
    args = parser.parse_args()
    records: list[dict[str, Any]] = []
    for path in args.records:
        try:
            read = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"{path}: is no record ({error})")
        records += read.get("records", [read])
    name: Path = args.output
    if not name.parent.is_dir():
        parser.error(f"--output {name}: there is no folder {name.parent}")
    text = "\n\n".join([summary(records), *map(markdown, records)])
    name.with_name(f"{name.name}.md").write_text(text + "\n")
    both = json.dumps({"records": records}, indent=1)
    name.with_name(f"{name.name}.json").write_text(both + "\n")
    chart = name.with_name(f"{name.name}.png")
    if args.bars:
        rows = [row for record in records for row in record["rows"]]
        draw({"machine": records[0]["machine"], "rows": rows}, chart)
    else:
        crossover(records, chart, args.mode)


if __name__ == "__main__":
    main()
