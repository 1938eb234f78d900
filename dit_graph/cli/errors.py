"""Tells what went wrong in one line, because whoever typed a command has no use for a traceback."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dit_graph.embedded import UnknownConcept

log = logging.getLogger("dit_graph")


class UsageError(ValueError):
    """What the caller asked for cannot work; the message is the line that they see."""


def one_line(error: BaseException) -> str:
    """Give an exception's text without its line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def told(doing: str) -> Iterator[None]:
    """Turn what a pipeline raises over its arguments or its machine into one line."""
    try:
        yield
    except UnknownConcept:
        raise
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        log.debug("%s failed", doing, exc_info=True)
        raise UsageError(f"{doing}: {type(error).__name__}: {one_line(error)}") from error


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Turn any failure to load into one line; what is broken or missing fails in many ways."""
    try:
        yield
    except Exception as error:
        log.debug("%s", what, exc_info=True)
        raise UsageError(f"{what}: {one_line(error)}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into one line."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def exit_code(command: str, run: Callable[[], None], tells: bool = True) -> int:
    """Run a command line: 0, 2 after an error that was told in one line, 130 when interrupted.

    `tells` is False where another process tells the same error.
    """
    try:
        run()
    except (UsageError, UnknownConcept) as error:
        if tells:
            print(f"{command}: error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return 130
    return 0
