"""The numbers of `python -m dit_graph.bench`, its records, tables and charts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from dit_graph.bench import chart, table, tasks
from dit_graph.bench.contenders import (
    Contender,
    eager_first,
)
from dit_graph.bench.measure import (
    Apart,
    Times,
    break_even,
    covered,
    difference,
    finite,
    first_and_set_up,
    percentile,
)
from dit_graph.bench.options import parse
from dit_graph.bench.rows import merged, with_gain
from dit_graph.bench.rows import row as made_row
from dit_graph.bench.shapes import SHAPES
from dit_graph.errors import ConfigError
from tests.launchers import ROOT

FROM_HERE = os.environ | {"PYTHONPATH": str(ROOT)}


def test_break_even() -> None:
    """2 s more set-up, 0.5 s less a picture: after four they are even, the fifth is a gain."""
    assert break_even(3.0, 0.5, 1.0, 1.0) == 5
    assert break_even(1.0, 0.5, 1.0, 1.0) == 1
    assert break_even(0.5, 1.0, 1.0, 1.0) == 1
    assert break_even(3.0, 1.0, 1.0, 1.0) is None
    assert break_even(3.0, 2.0, 1.0, 1.0) is None
    for setup, steady in [(3.0, 0.5), (1.5, 0.9), (9.0, 0.1)]:
        n = break_even(setup, steady, 1.0, 1.0)
        assert n is not None
        totals = [(setup + k * steady, 1.0 + k) for k in (n - 1, n)]
        assert totals[0][0] >= totals[0][1] and totals[1][0] < totals[1][1]


def test_numbers() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5.2, 5.5)]) == 4
    assert covered([]) == 0
    assert percentile([3.0], 0.95) == 3.0 and percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert 2.8 < percentile([1.0, 2.0, 3.0], 0.95) <= 3.0
    assert eager_first(["full", "eager", "full"]) == ["eager", "full"]
    x = torch.tensor([1.0, -4.0])
    assert difference(x, x.clone()) == Apart(True, 0)
    near = difference(x + torch.tensor([0.0, 0.04]), x)
    assert not near.equal and near.most == pytest.approx(0.01)
    assert difference(x, x * torch.nan) == Apart(False, None)
    assert difference(torch.tensor([0.0, 1]), torch.tensor([-0.0, 1])) == Apart(False, 0)
    assert difference(x * torch.nan, x * torch.nan).equal
    assert finite(x) and not finite(x * torch.inf) and not finite(torch.ones(3))


def row(**more: Any) -> dict[str, Any]:
    numbers = ("time_s", "step_ms_p50", "step_ms_p95", "set_up_s", "first_s", "difference",
               "device_s")  # fmt: skip
    missing = ("gain", "gpu_busy", "kernels_per_step", "launches_per_step", "mem_GB",
               "allocated_GB", "graph_MiB", "break_even_images")  # fmt: skip
    return {
        "scenario": "m 64x64", "model_cls": "M", "num_params_B": 1.0, "mode": "eager",
        "processes": 1, "images": 1, "images_per_s": 2.0, "set_up": "here", "equal": True,
        "stats": None,
        **dict.fromkeys(numbers, 0.5), **dict.fromkeys(missing), **more,
    }  # fmt: skip


def test_processes_are_merged() -> None:
    graphs = row(mode="full", graph_MiB=3.0, set_up_s=2.5, time_s=0.25)
    second = [row(time_s=0.7), {**graphs, "graph_MiB": 4.0, "equal": False, "difference": None}]
    both = merged([[row(), graphs], [*second, row(mode="x")]])
    assert [r["mode"] for r in both] == ["eager", "full"]
    assert both[0]["images_per_s"] == 4.0 and both[0]["time_s"] == 0.7
    assert both[1]["graph_MiB"] == 4.0 and both[1]["equal"] is False
    assert both[1]["difference"] is None and [r["processes"] for r in both] == [2, 2]
    assert both[1]["break_even_images"] == break_even(2.5, 0.25, 0.5, 0.7) == 5
    assert both[1]["gain"] == 2.8 and both[0]["gain"] is None


def test_a_batch_pays_from_its_first_picture() -> None:
    """2 s more set-up, 0.25 s less a call of four: the ninth call, whose first picture is 33rd."""
    rows = with_gain([row(images=4), row(images=4, mode="full", time_s=0.25, set_up_s=2.5)])
    assert rows[1]["break_even_images"] == 8 * 4 + 1


def test_set_ups_that_were_not_taken_alike_are_not_compared() -> None:
    rows = with_gain([row(), row(mode="full", time_s=0.25, set_up="fresh process")])
    assert rows[1]["break_even_images"] is None


def test_set_up_is_all_that_the_first_calls_take_longer() -> None:
    """Enabling 0.1 s, cold 0.03, recorded 0.6, compared 0.06, timed 0.03; later 0.01 each."""
    first, more = first_and_set_up(0.1, [0.03, 0.6, 0.06, 0.03], 0.01)
    assert first == pytest.approx(0.13)
    assert more == pytest.approx(0.1 + 0.02 + 0.59 + 0.05 + 0.02)


def test_eager_has_no_set_up_where_the_kernels_are_warm() -> None:
    """The others' is what their first calls took beyond the median of later ones."""
    task = tasks.Task("m 64x64 B1", torch.nn.Linear(2, 2), lambda contender: None, 1, 1)
    times = Times(0.5, warm=[9.0, 1.0], wall=[1.0, 3.0, 3.0])
    made = {
        name: made_row(task, Contender(name, None), times, None, Apart(True, 0.0), None)
        for name in ("eager", "full")
    }
    assert made["eager"]["set_up_s"] == 0 and made["eager"]["first_s"] == 3
    assert made["full"]["set_up_s"] == 0.5 + 10 - 2 * 3 and made["full"]["first_s"] == 9.5


def test_what_never_pays_says_so(tmp_path: Path) -> None:
    machine = {"gpu": "a GPU", "cpu": "a CPU"}
    rows = with_gain([row(), row(mode="full", time_s=0.6), row(mode="x", set_up="fresh process")])
    assert [r["break_even_images"] for r in rows] == [None, "never", None], "the last is not known"
    result = {"machine": machine, "notes": ["a note"], "rows": rows}
    text = table.markdown(result)
    assert text.count("never") == 1 and "* a note" in text and text.startswith("a GPU, cpu a CPU")
    chart.draw(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_records_are_put_together(tmp_path: Path) -> None:
    machine = {"gpu": "a GPU", "cpu": "a CPU"}
    for number, name in enumerate(("m 64x64", "n 96x64")):
        common = {"scenario": name, "tokens": 64}
        rows = with_gain([row(**common), row(**common, mode="breakable", time_s=0.25)])
        result = {"machine": machine, "notes": [], "rows": rows}
        (tmp_path / f"{number}.json").write_text(json.dumps(result))
    for given, name in ((("0.json", "1.json"), "both"), (("both.json",), "again")):
        files = [str(tmp_path / file) for file in given]
        command = [sys.executable, "benchmarks/pictures.py", *files, "--output", tmp_path / name]
        subprocess.run(command, check=True, cwd=ROOT, env=FROM_HERE)
    assert (tmp_path / "both.json").read_text() == (tmp_path / "again.json").read_text()
    text = (tmp_path / "both.md").read_text()
    assert "| m 64x64 | 64 | 2 | - | breakable | 2.00x | 2 |" in text and "**n 96x64**" in text
    assert (tmp_path / "both.png").stat().st_size > 1000
    for wrong, says in (("none.json", "is no record"), ("0.json", "no folder")):
        command = [sys.executable, "benchmarks/pictures.py", str(tmp_path / wrong), "--output"]
        command.append(str(tmp_path / "nowhere" / "x"))
        done = subprocess.run(command, cwd=ROOT, env=FROM_HERE, capture_output=True, text=True)
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_readmes_table_of_a_record(tmp_path: Path) -> None:
    """With the defaults, with the loop's waits taken out, and a column from an earlier record."""
    named = {"scenario": "dit-xl-2 256x256 B1 20 steps"}
    eager = row(**named, gpu_busy=0.112)
    graphs = {"gain": 6.3, "images_per_s": 8.567, "set_up_s": 0.72, "graph_MiB": 54.0}
    rows = [eager, row(**named | graphs, mode="breakable", gpu_busy=0.6)]
    more = graphs | {"gain": 7.0, "images_per_s": 9.0, "set_up_s": 0.2, "graph_MiB": 55.0}
    rows += [row(**named | more, mode="breakable+remove-syncs", gpu_busy=0.7)]
    rows += [row(scenario="m 64x64 B1 20 steps")]
    earlier = [eager, row(**named, mode="reduce-overhead", gain=5.184, set_up_s=44.7)]
    for name, found in (("now", rows), ("earlier", earlier)):
        one = {"machine": {}, "notes": [], "rows": found}
        (tmp_path / f"{name}.json").write_text(json.dumps({"records": [one]}))
    command = [sys.executable, "benchmarks/pictures.py", str(tmp_path / "now.json"), "--readme"]
    command.append(str(tmp_path / "earlier.json"))
    done = subprocess.run(command, cwd=ROOT, env=FROM_HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    titles, lines, first, second = done.stdout.splitlines()
    assert len({line.count("|") for line in (titles, lines, first, second)}) == 1
    assert first == (
        "| DiT-XL/2 | 256 | 2 | 8.57 | 6.30x | 9 | 7.00x | 11% → 70% | 0.7 | 54 | 5.18x, 45 |"
    )
    assert second == "| m | 64 | 2 |  |  |  |  |  |  |  |  |", "a contender that was not measured"


BENCH = """\
#!{python}
# Python, but the benchmark measures nothing: it fails with one model, and in the middle of others.
import json, os, sys
if sys.argv[1:3] != ["-m", "dit_graph.bench"]:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
with open({log!r}, "a") as log:
    print(json.dumps(sys.argv[3:]), file=log)
given = dict(zip(sys.argv[3:-2:2], sys.argv[4:-2:2])) | dict([sys.argv[-2:]])
model, sizes = given["--model"], given["--sizes"].split(",")
if model == "flux-dev" or (model == "sana-1.6b" and len(sizes) > 1):
    sys.exit(2)
rows = []
for side in sizes[:1] if model == "z-image" else sizes:
    for mode in given["--compare"].split(","):
        scenario = f"{{model}} {{side}}x{{side}} B1"
        rows.append({row!r} | {{"scenario": scenario, "mode": mode, "tokens": 64}})
record = {{"machine": {{"gpu": "a GPU"}}, "notes": [], "rows": rows}}
for suffix in ("json", "md"):
    with open(given["--output"] + "." + suffix, "w") as file:
        json.dump(record, file)
sys.exit(2 if model == "z-image" else 0)
"""


def test_a_row_that_fails_takes_no_other_along(tmp_path: Path) -> None:
    """`benchmarks/pictures.sh`, with a benchmark that measures nothing."""
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(BENCH.format(python=sys.executable, log=str(log), row=row()))
    python.chmod(0o755)
    models = ["dit-xl-2", "sana-1.6b", "z-image", "flux-dev", "qwen-image"]
    out = tmp_path / "a folder"
    environment = FROM_HERE | {"PYTHON": str(python), "NAME": "all", "PYTHONPATH": ""}
    command = ["bash", str(ROOT / "benchmarks/pictures.sh"), str(out), *models]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {"all.json", "all.md", "all.png"}
    rows = [r for one in json.loads((out / "all.json").read_text())["records"] for r in one["rows"]]
    assert list(dict.fromkeys(r["scenario"].removesuffix(" B1") for r in rows)) == [
        "dit-xl-2 256x256", "dit-xl-2 512x512", "sana-1.6b 1024x1024", "z-image 512x512",
        "qwen-image 512x512", "qwen-image 1024x1024",
    ]  # fmt: skip
    assert "flux-dev failed" in done.stderr and "dit-xl-2 failed" not in done.stderr
    out.joinpath("records").mkdir()  # in which the benchmark would have written
    for argv in map(json.loads, log.read_text().splitlines()):
        options = parse(argv)
        assert options.compare == ("eager", "breakable", "breakable+remove-syncs")
        assert options.set_up == "here" and options.sizes and options.images <= 4


def test_gain_against_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(tokens=64, time_s=1.0), row(mode="breakable", tokens=64, time_s=0.25)]
    more = {"scenario": "m 128x128", "tokens": 256}
    rows += [row(**more), row(**more, mode="breakable")]
    result = {"machine": {"gpu": "a GPU", "cpu": "a CPU"}, "notes": [], "rows": rows}
    figures, real = [], chart.empty_figure
    monkeypatch.setattr(chart, "empty_figure", lambda: figures.append(real()) or figures[-1])
    chart.crossover([result], tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as drawn:
        assert drawn.size == (880, 550)
    (axes,) = figures[0].axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[64, 4.0], [256, 1.0]]]
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts[:-1] == ["4.00x"] and "under 1.05x" in texts[-1] and len(axes.patches) == 1
    with pytest.raises(ConfigError, match="no row of full"):
        chart.crossover([result], tmp_path / "x.png", "full")
    sizes = {name: shape.tokens((512, 512)) for name, shape in SHAPES.items()}
    assert sizes["flux-dev"] == 1024 and sizes["sana-1.6b"] == 256 and sizes["wan-1.3b"] == 5120
