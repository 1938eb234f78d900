"""Put records of `python -m dit_graph.bench` together, such as those of `benchmarks/pictures.sh`.

    python benchmarks/pictures.py FOLDER/records/*.json --output benchmarks/results/pictures_h200

writes NAME.json (the records), NAME.md (a line a scenario, then every table) and NAME.png (gain
against image tokens, or with --bars the time of every variant).

    python benchmarks/pictures.py RECORD.json --readme EARLIER.json

prints README's table of the records, its last column from an earlier record.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dit_graph.bench.chart import crossover, draw
from dit_graph.bench.table import markdown, summary
from dit_graph.errors import ConfigError

NAMES = {
    "dit-xl-2": "DiT-XL/2", "pixart-sigma": "PixArt-Σ", "sana-1.6b": "Sana-1.6B",
    "sd3.5-medium": "SD3.5-M", "wan-1.3b": "Wan-1.3B, 17 frames", "z-image": "Z-Image",
    "flux-dev": "Flux-dev", "qwen-image": "Qwen-Image",
}  # fmt: skip
TITLES = (
    "model", "px", "eager", "`breakable`", "gain", "`breakable` + `remove_syncs`", "gain",
    "GPU busy", "set-up s", "graph MiB", "`reduce-overhead`: gain, set-up s",
)  # fmt: skip

Record = dict[str, Any]


def by_scenario(records: list[Record]) -> dict[str, dict[str, Any]]:
    """The rows of each scenario, by variant."""
    found: dict[str, dict[str, Any]] = {}
    for row in (row for record in records for row in record["rows"]):
        found.setdefault(row["scenario"], {})[row["mode"]] = row
    return found


def readme(records: list[Record], earlier: list[Record]) -> str:
    """README's table. Set-up and graph memory are those of the defaults; "GPU busy" is eager's and
    that with `remove_syncs`."""
    before = by_scenario(earlier)
    lines = ["| " + " | ".join(TITLES) + " |", "|" + "---|" * len(TITLES)]
    for scenario, rows in by_scenario(records).items():
        model, size, *_ = scenario.split()
        fused = shown(before.get(scenario, {}), "reduce-overhead", "{gain:.2f}x, {set_up_s:.0f}")
        cells = [NAMES.get(model, model), size.split("x")[0]]
        cells.append(shown(rows, "eager", "{images_per_s:.3g}"))
        for mode in ("breakable", "breakable+remove-syncs"):
            cells += [shown(rows, mode, "{images_per_s:.3g}"), shown(rows, mode, "{gain:.2f}x")]
        busy = [shown(rows, m, "{gpu_busy:.0%}") for m in ("eager", "breakable+remove-syncs")]
        cells += [" → ".join(filter(None, busy)), shown(rows, "breakable", "{set_up_s:.1f}")]
        cells += [shown(rows, "breakable", "{graph_MiB:.0f}"), fused]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(rows: dict[str, Any], mode: str, form: str) -> str:
    """Numbers of a variant's row; empty where they were not measured."""
    try:
        return form.format_map(rows[mode])
    except (KeyError, TypeError):  # no such row, or None in it
        return ""


def put_together(records: list[Record], name: Path, bars: bool, mode: str) -> None:
    """Write NAME.json, NAME.md and the chart, which may fail: the numbers are there."""
    text = "\n\n".join([summary(records), *map(markdown, records)])
    name.with_name(f"{name.name}.md").write_text(text + "\n")
    both = json.dumps({"records": records}, indent=1)
    name.with_name(f"{name.name}.json").write_text(both + "\n")
    chart = name.with_name(f"{name.name}.png")
    try:
        if bars:
            rows = [row for record in records for row in record["rows"]]
            draw({"machine": records[0]["machine"], "rows": rows}, chart)
        else:
            crossover(records, chart, mode)
    except ConfigError as error:
        print(f"no {chart.name}: {error}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD.json")
    parser.add_argument("--mode", default="breakable", help="the variant (default breakable)")
    parser.add_argument("--bars", action="store_true", help="draw a bar a variant")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, metavar="NAME")
    what.add_argument("--readme", type=Path, metavar="EARLIER.json", help="print README's table")
    args = parser.parse_args()

    def read(paths: list[Path]) -> list[Record]:
        found: list[Record] = []
        for path in paths:
            try:
                record = json.loads(path.read_text())
            except (OSError, ValueError) as error:
                parser.error(f"{path}: is no record ({error})")
            found += record.get("records", [record])
        return found

    records = read(args.records)
    if args.readme is not None:
        print(readme(records, read([args.readme])))
        return
    if not args.output.parent.is_dir():
        parser.error(f"--output {args.output}: there is no folder {args.output.parent}")
    put_together(records, args.output, args.bars, args.mode)


if __name__ == "__main__":
    main()
