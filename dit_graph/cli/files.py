"""Puts pictures on disk, under free names and with their settings inside, whole or not at all."""

import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dit_graph.cli.errors import UsageError, one_line, writing
from dit_graph.errors import ConfigError
from dit_graph.explain.plot import empty_figure

if TYPE_CHECKING:
    from dit_graph.cli.generate import GenerateOptions

THUMBNAIL = 256
"""The longest side of a picture on the contact sheet has so many pixels."""


def check(options: "GenerateOptions") -> None:
    """Raise UsageError unless the pictures can go to where they are asked to go."""
    path = options.output
    if options.single_file:
        if options.total > 1:
            raise UsageError(
                f"--output {path}: is one file for {options.total} pictures; give a folder"
            )
        if path.exists():
            raise UsageError(f"--output {path}: is there already; give another name or delete it")
        path = path.parent
    elif path.exists() and not path.is_dir():
        raise UsageError(f"--output {path}: is no folder and no .png; give one of them")
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    check_writable("--output", options.output, there)


def check_writable(option: str, path: Path, folder: Path) -> None:
    """Raise UsageError unless `folder`, in which the `path` of an option will lie, takes files."""
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: nothing can be written in {folder}")


def check_png(option: str, path: Path) -> None:
    """Raise UsageError unless a chart can be drawn at all, and go to the `path` of an option."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; give the name of a file")
    if path.suffix.lower() != ".png":
        raise UsageError(f"{option} {path}: is no .png file; give a name that ends in .png")
    check_writable(option, path, path.parent)
    try:
        empty_figure()
    except ConfigError as error:
        raise UsageError(f"{option}: {one_line(error)}") from error


def free_numbers(folder: Path, count: int) -> list[int]:
    """Find the first `count` numbers that no picture in `folder` has."""
    names = os.listdir(folder) if folder.is_dir() else []
    found = (re.match(r"(\d{4,})-.*\.png$", name) for name in names)
    used = {int(match[1]) for match in found if match}
    return list(itertools.islice((n for n in itertools.count(1) if n not in used), count))


def named(folder: Path, number: int, prompt: str, size: tuple[int, int], seed: int) -> Path:
    """Make a picture's path from what it shows; `size` is (width, height)."""
    words = re.sub(r"[\W_]+", "-", prompt.lower()).strip("-")[:40].strip("-")
    width, height = size
    return folder / f"{number:04d}-{words or 'picture'}-{width}x{height}-seed{seed}.png"


def _sheet_path(folder: Path) -> Path:
    """Give `contact-sheet.png` in `folder` a number where that is there already."""
    more = map("contact-sheet-{}.png".format, itertools.count(2))
    paths = (folder / name for name in itertools.chain(["contact-sheet.png"], more))
    return next(path for path in paths if not os.path.lexists(path))


def save(picture: Image.Image, path: Path, settings: dict[str, str]) -> None:
    """Write a PNG with `settings` as its text; `path` has all of it or does not exist.

    Raises:
        UsageError: it cannot be written.
    """
    info = PngInfo()
    for name, value in settings.items():
        info.add_text(name, value)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{os.getpid()}-{path.name[:40]}.partial")
        try:
            with partial.open("xb") as file:
                picture.save(file, format="PNG", pnginfo=info)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def save_sheet(pictures: Sequence[Path], folder: Path) -> Path:
    """Save a contact sheet of saved pictures.

    Its text under `pictures` is JSON: each file's name and what it was made with.
    """
    path = _sheet_path(folder)
    told_of, thumbnails = [], []
    for saved in pictures:
        with Image.open(saved) as picture:
            told_of.append({"file": saved.name, **getattr(picture, "text", {})})
            small = picture.convert("RGB")
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        thumbnails.append(small)
    save(contact_sheet(thumbnails), path, {"pictures": json.dumps(told_of)})
    return path


def contact_sheet(pictures: Sequence[Image.Image]) -> Image.Image:
    """Put the pictures in reading order on a white grid that is about square."""
    columns = math.ceil(math.sqrt(len(pictures)))
    width, height = (max(p.size[axis] for p in pictures) + 4 for axis in (0, 1))
    rows = math.ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    for place, picture in enumerate(pictures):
        row, column = divmod(place, columns)
        left = column * width + (width - picture.width) // 2
        sheet.paste(picture, (left, row * height + (height - picture.height) // 2))
    return sheet
