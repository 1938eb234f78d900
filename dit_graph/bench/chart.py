"""Draws a record: the time of a step, a bar for each contender, and gain against tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dit_graph.errors import ConfigError
from dit_graph.explain.plot import empty_figure

_COLOURS = ("#8c8c8c", "#2a6fbb", "#e07b00", "#6a994e", "#9b5de5", "#c1121f")
_LITTLE = 1.05
"""A gain below this is shown as next to none."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    rows = result["rows"]
    scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure = empty_figure()
    figure.set_size_inches(9, 1.2 + 0.28 * len(rows) + 0.3 * len(scenarios))
    axes = figure.add_subplot()
    place, ticks = 0.0, []
    for scenario in scenarios:
        mine = [row for row in rows if row["scenario"] == scenario]
        ticks.append((place + (len(mine) - 1) / 2, scenario))
        for row in mine:
            colour = _COLOURS[modes.index(row["mode"]) % len(_COLOURS)]
            label = row["mode"] if scenario == scenarios[0] else None
            axes.barh(place, row["step_ms_p50"], color=colour, label=label)
            gain = "" if row["gain"] is None else f", {row['gain']:.2f}x"
            text = f" {row['step_ms_p50']:.4g} ms{gain}"
            axes.text(row["step_ms_p50"], place, text, va="center", fontsize=8)
            place += 1
        place += 0.7
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms a step, wall clock, median")
    axes.set_title(result["machine"]["gpu"] or f"no GPU: {result['machine']['cpu']}", fontsize=9)
    axes.margins(x=0.18)
    figure.legend(fontsize=8, loc="outside lower center", ncols=len(modes))
    figure.savefig(path, format="png", dpi=110)


def crossover(results: Sequence[dict[str, Any]], path: Path, mode: str = "breakable") -> None:
    """Draw gain over eager against image tokens, a line for each model, batch and steps, as a PNG.

    Args:
        results: records of runs; rows of other modes and of unknown token counts are left out.

    Raises:
        ConfigError: matplotlib is not installed, or no row is left.
    """
    lines = _lines(results, mode)
    if not lines:
        raise ConfigError(f"no row of {mode} with a token count to draw")
    figure = empty_figure()
    figure.set_size_inches(8, 5)
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    calls = {name.partition(" ")[2] for name in lines}  # These are the batch and the steps.
    for name, points in lines.items():
        label = name if len(calls) > 1 else name.split()[0]
        axes.plot(*zip(*sorted(points)), marker="o", label=label)
        for tokens, gain in points:
            if gain >= _LITTLE:
                axes.annotate(f" {gain:.2f}x", (tokens, gain), fontsize=7, va="bottom")
    axes.axhspan(min(1.0, axes.get_ylim()[0]), _LITTLE, color="#8c8c8c", alpha=0.3, linewidth=0)
    axes.annotate(
        f"under {_LITTLE:g}x: the device is busy anyway, graphs gain next to nothing",
        (0.01, 0.01), xycoords="axes fraction", fontsize=8, va="bottom",
    )  # fmt: skip
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.set_xlabel("image tokens of a picture")
    axes.set_ylabel(f"eager time / {mode} time of a picture")
    machines = {result["machine"]["gpu"] or result["machine"]["cpu"] for result in results}
    axes.set_title(", ".join([*sorted(machines), *sorted(calls)]), fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, format="png", dpi=110)


def _lines(results: Sequence[dict[str, Any]], mode: str) -> dict[str, list[tuple[int, float]]]:
    """Collect the points (tokens, gain) of each line of `crossover` by its name."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        eager = {r["scenario"]: r["time_s"] for r in result["rows"] if r["mode"] == "eager"}
        for row in result["rows"]:
            if row["mode"] == mode and row["tokens"] and row["scenario"] in eager:
                point = row["tokens"], eager[row["scenario"]] / row["time_s"]
                name, _, *rest = row["scenario"].split()  # The size is what a line runs over.
                lines.setdefault(" ".join([name, *rest]), []).append(point)
    return lines
