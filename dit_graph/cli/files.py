"""Pictures on disk: names that are free, settings inside, whole or not there at all."""

import itertools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dit_graph.cli.errors import UsageError
from dit_graph.cli.options import Options

THUMBNAIL = 256
"""Longest side in pixels of a picture on the contact sheet."""


def check(options: Options) -> None:
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
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"--output {options.output}: nothing can be written in {there}")


def free_numbers(folder: Path, count: int) -> list[int]:
    """The first `count` numbers that no picture in `folder` has."""
    found = (re.match(r"(\d{4,})-.*\.png$", name) for name in _names(folder))
    used = {int(match[1]) for match in found if match}
    return list(itertools.islice((n for n in itertools.count(1) if n not in used), count))


def named(folder: Path, number: int, prompt: str, size: tuple[int, int], seed: int) -> Path:
    """A picture's path; `size` is (width, height)."""
    words = re.sub(r"[\W_]+", "-", prompt.lower()).strip("-")[:40].strip("-")
    width, height = size
    return folder / f"{number:04d}-{words or 'picture'}-{width}x{height}-seed{seed}.png"


def sheet_path(folder: Path) -> Path:
    """`contact-sheet.png` in `folder`, or with a number where that is there already."""
    used = set(_names(folder))
    more = map("contact-sheet-{}.png".format, itertools.count(2))
    names = itertools.chain(["contact-sheet.png"], more)
    return folder / next(name for name in names if name not in used)


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def save(picture: Image.Image, path: Path, settings: dict[str, str]) -> None:
    """Write a PNG with `settings` as its text; `path` has all of it or does not exist."""
    info = PngInfo()
    for name, value in settings.items():
        info.add_text(name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{os.getpid()}-{path.name[:40]}.partial")
    try:
        with partial.open("xb") as file:
            picture.save(file, format="PNG", pnginfo=info)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def thumbnail(path: Path) -> Image.Image:
    """A small copy of a saved picture, for the contact sheet."""
    with Image.open(path) as picture:
        small = picture.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    return small


def settings_of(path: Path) -> dict[str, str]:
    """What a saved picture was made with."""
    with Image.open(path) as picture:
        text: dict[str, str] = dict(getattr(picture, "text", {}))
    return text


def contact_sheet(pictures: Sequence[Image.Image]) -> Image.Image:
    """The pictures in reading order on a white grid that is about square."""
    columns = math.ceil(math.sqrt(len(pictures)))
    width, height = (max(p.size[axis] for p in pictures) + 4 for axis in (0, 1))
    rows = math.ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    for place, picture in enumerate(pictures):
        row, column = divmod(place, columns)
        left = column * width + (width - picture.width) // 2
        sheet.paste(picture, (left, row * height + (height - picture.height) // 2))
    return sheet
