"""Draw pictures from the command line: `python -m dit_graph.generate fox`.

Owns the order of things: check all that can be checked, load, record, draw, report. Under a
launcher each process draws a part, and the main one reports for all.
"""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tqdm import tqdm

import dit_graph
from dit_graph.cli import files, model, ranks
from dit_graph.cli.errors import UsageError, one_line, told
from dit_graph.cli.options import Options, parse
from dit_graph.cli.parser import Size
from dit_graph.cli.ranks import Processes
from dit_graph.explain.report import summed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`.

    Returns:
        0, 2 after an error that was told in one line, 130 when interrupted.
    """
    return ranks.exit_code("generate", lambda processes: _run(argv, processes))


@dataclass(frozen=True)
class _Call:
    """One call of the pipeline: all pictures of a prompt and a size, drawn together.

    `first` counts the pictures before it, over all processes. The seeds follow from it.
    """

    prompt: str
    size: Size
    first: int


@dataclass
class _Share:
    """What one process has done, as all processes get to know it."""

    saved: dict[int, Path] = field(default_factory=dict)  # by the picture's place among all
    stats: dict[str, Any] = field(default_factory=lambda: summed([]))  # zeros under --no-graph
    report: str = ""
    failed: str = ""


def _run(argv: Sequence[str] | None, processes: Processes) -> None:
    options = processes.together(lambda: _checked(argv))
    pairs = itertools.product(options.prompts, options.sizes)
    calls = [_Call(*pair, number * options.count) for number, pair in enumerate(pairs)]
    numbers = None
    if processes.count > 1:  # decided once: two processes would find the same ones free
        numbers = processes.broadcast(files.free_numbers(options.output, options.total))
    share = _Share()
    mine = processes.mine(calls)
    share.failed = processes.failure(lambda: _draw(mine, share, numbers, options, processes))
    shares = processes.gather(share)
    failed = processes.summary([share.failed for share in shares])
    if processes.is_main:
        if not failed:
            _save_sheet(shares, options)
        _report(shares, calls, options, processes)
    if failed:
        raise UsageError(failed)


def _checked(argv: Sequence[str] | None) -> Options:
    options = parse(argv)
    files.check(options)
    model.check(options)
    return options


def _draw(
    calls: Sequence[_Call],
    share: _Share,
    numbers: Sequence[int] | None,
    options: Options,
    processes: Processes,
) -> None:
    """All pictures of `calls`, each in `share` as soon as it is saved."""
    if not calls:  # there are more processes than calls
        return
    pipe = model.load(options, processes.device)
    with _graphed(pipe, options) as handle:
        run = _Run(pipe, options, share, numbers)
        try:
            if handle is not None and options.warmup_sizes:
                run.warm_up(handle)
            run.draw(calls, processes.is_main)
        finally:
            if handle is not None:
                share.stats, share.report = handle.stats(), handle.report()


@contextmanager
def _graphed(pipe: Any, options: Options) -> Iterator[dit_graph.Handle | None]:
    """The pipeline's handle, or None under --no-graph; on `cpu` it is eager and says so."""
    if not options.graph:
        yield None
        return
    device = "recorder" if options.device == "recorder" else "auto"
    try:
        handle = dit_graph.enable(pipe, device=device, backend=options.backend)
    except dit_graph.DitGraphError as error:
        raise UsageError(f"{one_line(error)}; --no-graph draws without graphs") from error
    with handle:
        yield handle


def _save_sheet(shares: Sequence[_Share], options: Options) -> None:
    """The contact sheet of all processes' pictures, in the order in which one would draw them.

    Its text under `pictures` is JSON: each file's name and what it was made with.
    """
    saved = {number: path for share in shares for number, path in share.saved.items()}
    paths = [saved[number] for number in sorted(saved)]
    here = [path for path in paths if path.exists()]
    if len(here) < len(paths):
        _say(f"{len(paths) - len(here)} pictures are on other machines", options)
    if len(here) > 1:
        path = files.sheet_path(options.output)
        told_of = [{"file": saved.name, **files.settings_of(saved)} for saved in here]
        sheet = files.contact_sheet([files.thumbnail(saved) for saved in here])
        _write(sheet, path, {"pictures": json.dumps(told_of)})
        _say(str(path), options)


def _report(
    shares: Sequence[_Share], calls: Sequence[_Call], options: Options, processes: Processes
) -> None:
    """What was recorded, of one process as its handle says it, of several with the sums."""
    stats = summed(share.stats for share in shares)
    lost = _not_drawn(shares, calls, options)
    if options.report == "json":
        print(json.dumps(stats | ({"not_drawn": lost} if lost else {})))
        return
    if processes.count == 1:
        print(shares[0].report, end="\n" if shares[0].report else "")
        return
    for name, share in zip(processes.names, shares):
        lines = share.report.splitlines() + [f"failed: {share.failed}"] * bool(share.failed)
        print("\n  ".join([f"{name}: {len(share.saved)} pictures", *lines]))
    eager = stats.pop("eager")
    print("all processes:", ", ".join(f"{name} {count}" for name, count in stats.items()))
    for reason, count in eager.items():
        print(f"  eager {count}: {reason}")
    for call in lost:
        print(f"  not drawn: {call}")


def _not_drawn(shares: Sequence[_Share], calls: Sequence[_Call], options: Options) -> list[str]:
    saved = {number for share in shares for number in share.saved}
    return [
        f"{call.prompt!r} {model.spelt(call.size) + ' ' if call.size else ''}"
        f"seed {options.seed + number}"
        for call in calls
        for number in range(call.first, call.first + options.count)
        if number not in saved
    ]


def _say(text: str, options: Options) -> None:
    """A line for people: on stdout, or on stderr where stdout is for a program."""
    file = sys.stderr if options.report == "json" else sys.stdout
    tqdm.write(f"{text}\n", file=file, end="")  # in one piece: other processes write there too


@dataclass
class _Run:
    """One pipeline drawing a part of what the options ask for.

    `numbers` are those of all files; None takes the first that is free when a picture is saved.
    """

    pipe: Any
    options: Options
    share: _Share
    numbers: Sequence[int] | None

    def __post_init__(self) -> None:
        self.fixed = model.arguments(type(self.pipe), self.options)

    def warm_up(self, handle: dit_graph.Handle) -> None:
        """Record the warm-up sizes with the batch and the prompt of the first picture."""
        call = self._arguments(_Call(self.options.prompts[0], {}, 0))
        for name in ("num_inference_steps", "output_type"):  # which warmup sets itself
            call.pop(name, None)
        sizes = [(size["height"], size["width"]) for size in self.options.warmup_sizes]
        with told("warming up"):
            handle.warmup(sizes=sizes, **call)

    def draw(self, calls: Sequence[_Call], shows: bool) -> None:
        """The pictures of `calls`, each saved as soon as it is there; `shows` has the bar."""
        total = len(calls) * self.options.count
        with tqdm(total=total, unit="picture", file=sys.stderr, disable=not shows) as bar:
            for call in calls:
                for number, picture in enumerate(self._pictures(call), call.first):
                    self._save(picture, call.prompt, number)
                    bar.update()

    def _arguments(self, call: _Call) -> dict[str, Any]:
        """The arguments of one call. Each picture has its own generator, so it stands alone."""
        first = self.options.seed + call.first
        seeds = range(first, first + self.options.count)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return {**self.fixed, **call.size, "prompt": call.prompt, "generator": generators}

    def _pictures(self, call: _Call) -> list[Image.Image]:
        with told(f"drawing {call.prompt!r}"):
            output = self.pipe(**self._arguments(call))
        if hasattr(output, "images"):
            return list(output.images)
        return [frames[0] for frames in output.frames]  # of a video model: its one frame each

    def _save(self, picture: Image.Image, prompt: str, number: int) -> None:
        path, seed = self.options.output, self.options.seed + number
        if not self.options.single_file:
            free = self.numbers[number] if self.numbers else files.free_numbers(path, 1)[0]
            path = files.named(path, free, prompt, picture.size, seed)
        _write(picture, path, self._settings(picture, prompt, seed))
        self.share.saved[number] = path
        _say(f"{path} seed {seed}", self.options)

    def _settings(self, picture: Image.Image, prompt: str, seed: int) -> dict[str, str]:
        """What the picture was made with, so that it can be made again."""
        options, cls = self.options, type(self.pipe)
        eager = not options.graph or options.device == "cpu"
        settings = {
            "prompt": prompt,
            "negative_prompt": options.negative_prompt or "",
            "size": "x".join(map(str, picture.size)),
            "steps": str(model.effective(cls, self.fixed, "num_inference_steps")),
            "guidance_scale": str(model.effective(cls, self.fixed, "guidance_scale")),
            "seed": str(seed),
            "model": options.model or "embedded",
            "dtype": str(options.dtype).removeprefix("torch."),
            "dit_graph": dit_graph.__version__,
            "backend": "eager" if eager else options.backend,
        }
        if options.loras:
            settings["lora"] = json.dumps(options.loras)
        if options.pipeline_kwargs:
            settings["pipeline_kwargs"] = json.dumps(options.pipeline_kwargs)
        return settings


def _write(picture: Image.Image, path: Any, settings: dict[str, str]) -> None:
    try:
        files.save(picture, path, settings)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
