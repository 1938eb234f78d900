"""Draws an explanation: each variant is a row of segments, to scale, with breaks between them."""

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dit_graph.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dit_graph.explain.facts import Explanation, Variant

COLOURS = {
    "segment": "#4c78a8",
    "break": "#f58518",
    "marked break": "#b8450b",
    "reset": "#9d9d9d",
    "whole call": "#9d9d9d",
}
_LABEL = 48
"""A line of a row's label has at most so many characters, so that the bars keep their room."""

Row = tuple[str, "Variant"]


def figure(explanation: "Explanation") -> "Figure":
    """Draw variants whose times are known and the others apart, because their units differ.

    Raises:
        ConfigError: matplotlib is not installed, or nothing is recorded.
    """
    made = empty_figure()
    rows = list(_rows(explanation))
    timed = [row for row in rows if row[1].ms is not None]
    counted = [row for row in rows if row[1].ms is None]
    parts = [(part, unit) for part, unit in ((timed, "ms"), (counted, "operations")) if part]
    if not parts:
        raise ConfigError("nothing is recorded, so there is nothing to plot; call it first")
    heights = [len(part) + 1.5 for part, _ in parts]
    lines = max(label.count("\n") + 1 for label, _ in rows)
    made.set_size_inches(12, 1 + max(0.45, 0.16 * lines) * sum(heights))
    grid = made.subplots(len(parts), squeeze=False, height_ratios=heights)
    for axes, (part, unit) in zip(grid[:, 0], parts):
        _draw(axes, part, unit)
    return made


def empty_figure() -> "Figure":
    """Make a figure without axes. Only this imports matplotlib, which need not be installed.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a plot needs matplotlib: pip install matplotlib, or the extra dit_graph[plot]"
        ) from error
    return Figure(layout="constrained")


def _rows(explanation: "Explanation") -> Iterator[Row]:
    for module in explanation.modules:
        for signature in module.signatures:
            for number, variant in enumerate(signature.variants):
                label = textwrap.fill(f"{module.name} {signature.label}", _LABEL)
                yield f"{label}\nvariant {number}", variant


def _draw(axes: Any, rows: list[Row], unit: str) -> None:
    """Draw one bar for each step, rows from top to bottom, and a legend of the kinds that occur."""
    shown: dict[str, Any] = {}
    widest = max(sum(step.ops or 0 for step in variant.steps) for _, variant in rows)
    thin = max(widest, 1) / 150  # A break has no operations and must be seen all the same.
    for y, (_, variant) in enumerate(rows):
        left = 0.0
        for step in variant.steps:
            width = (step.ms or 0.0) if unit == "ms" else float(step.ops or 0) or thin
            kind = "marked break" if step.marked else step.kind
            bar = axes.barh(
                y, width, left=left, height=0.6, color=COLOURS[kind], edgecolor="white",
                linewidth=0.4,
            )  # fmt: skip
            shown.setdefault(kind, bar)
            left += width
        axes.text(left, y, f"  {_summary(variant)}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms, each step run by itself" if unit == "ms" else
                    "operations (breaks are not to scale)")  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(shown.values(), shown.keys(), loc="lower right", fontsize=8, ncols=len(shown),
                bbox_to_anchor=(1, 1), frameon=False)  # fmt: skip


def _summary(variant: "Variant") -> str:
    """Say in short what stands at the end of a row."""
    total = "" if variant.ms is None else f"{variant.ms:.3g} ms, "
    return f"{total}{variant.count('segment')} segments, {variant.count('break')} breaks"
