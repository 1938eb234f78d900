"""Tells a record as a Markdown table."""

from collections.abc import Callable, Sequence
from typing import Any

from dit_graph.bench.contenders import EAGER

_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("mode", "mode", str),
    ("processes", "processes", str),
    ("gain", "gain", lambda v: f"{v:.2f}x"),
    ("images_per_s", "images/s", lambda v: f"{v:.3g}"),
    ("time_s", "time s", lambda v: f"{v:.4g}"),
    ("step_ms_p50", "ms a step p50", lambda v: f"{v:.4g}"),
    ("step_ms_p95", "p95", lambda v: f"{v:.4g}"),
    ("gpu_busy", "GPU busy", lambda v: f"{v:.0%}"),
    ("kernels_per_step", "kernels", lambda v: f"{v:.0f}"),
    ("launches_per_step", "launches", lambda v: f"{v:.0f}"),
    ("set_up_s", "set-up s", lambda v: f"{v:.3g}"),
    ("mem_GB", "mem GB", lambda v: f"{v:.3g}"),
    ("allocated_GB", "allocated GB", lambda v: f"{v:.3g}"),
    ("graph_MiB", "graph MiB", lambda v: f"{v:.0f}"),
    ("equal", "equal", lambda v: "yes" if v else "no"),
    ("difference", "difference", lambda v: f"{v:.1e}" if v else "0"),
    ("break_even_images", "pays from picture", str),
)

_TITLES = {
    "prefill": {"images/s": "prompts/s", "ms a step p50": "ms p50",
                "pays from picture": "pays from prompt"},
    "step": {"images/s": "samples/s", "ms a step p50": "ms p50",
             "pays from picture": "pays from sample"},
}  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """Tell the machine in one line, what was not measured, and each scenario in a table."""
    lines = [_machine(result["machine"]), "", *(f"* {note}" for note in result["notes"]), ""]
    rows, titles = result["rows"], _TITLES.get(result.get("options", {}).get("what"), {})
    columns = [c for c in _COLUMNS if any(row.get(c[0]) is not None for row in rows)]
    if all(row["processes"] == 1 for row in rows):
        columns = [c for c in columns if c[0] != "processes"]
    if all(row["equal"] for row in rows):
        columns = [c for c in columns if c[0] != "difference"]
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        mine = [row for row in rows if row["scenario"] == scenario]
        lines += [f"**{scenario}** ({mine[0]['model_cls']}, {mine[0]['num_params_B']:.3g} B)", ""]
        lines.append("| " + " | ".join(titles.get(title, title) for _, title, _ in columns) + " |")
        lines.append("|" + " --- |" * len(columns))
        for row in mine:
            cells = [_cell(row, name, shown) for name, _, shown in columns]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _cell(row: dict[str, Any], name: str, shown: Callable[[Any], str]) -> str:
    value = row.get(name)  # An older record may lack a column.
    return "-" if value is None else shown(value)


def _machine(machine: dict[str, Any]) -> str:
    known = [f"{name} {value}" for name, value in machine.items() if value and name != "gpu"]
    return ", ".join([machine["gpu"] or "no GPU", *known])


_OF_EAGER = ("images_per_s", "gpu_busy")
_SUMMED = ("mode", "gain", "images_per_s", "gpu_busy", "set_up_s", "allocated_GB", "graph_MiB",
           "equal", "break_even_images")  # fmt: skip


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Put several records in one table, with the others of a scenario beside its eager."""
    columns = [column for column in _COLUMNS if column[0] in _SUMMED]
    titles = ["", "tokens", "eager images/s", "eager GPU busy", *(title for _, title, _ in columns)]
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]
    for row in (row for result in results for row in result["rows"]):
        named = [row["scenario"], str(row["tokens"] or "-")]
        if row["mode"] == EAGER:
            eager = [_cell(row, name, shown) for name, _, shown in columns if name in _OF_EAGER]
        else:
            cells = [_cell(row, name, shown) for name, _, shown in columns]
            lines.append("| " + " | ".join([*named, *eager, *cells]) + " |")
    return "\n".join(lines)
