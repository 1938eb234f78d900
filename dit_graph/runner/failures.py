"""What an error in a recording or a replay says: whose it is, and how it is told in one line."""

import traceback

from dit_graph.capture.frames import raised_in
from dit_graph.devices.base import is_out_of_memory
from dit_graph.errors import DitGraphError
from dit_graph.tape.guards import DeviceNumber
from dit_graph.tape.tape import Tape


def raised_by_the_forward(error: BaseException, tape: Tape) -> bool:
    """Whether it is the forward's own error, which eager would raise as well.

    Not where it may come of the recording: from our code or torch's, from an error about capturing
    or about memory, or from a number that a stand-in took the place of.
    """
    if not raised_in(error) or is_out_of_memory(error):
        return False
    if any(type(home) is DeviceNumber for step in tape.breaks() for home in step.homes):
        return False
    led: BaseException | None = error
    while led is not None:
        if isinstance(led, DitGraphError) or "captur" in str(led).lower():
            return False
        led = led.__cause__ or led.__context__
    return True


def clear_frames(error: BaseException) -> None:
    """Of an error and of all that led to it, those that a compiler has wrapped too."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            todo += [one.__cause__, one.__context__, getattr(one, "inner_exception", None)]


def brief(error: Exception) -> str:
    """The first line of an error, or of the one that a compiler has wrapped."""
    inner = getattr(error, "inner_exception", None) or error
    lines = str(inner).strip().splitlines()
    return f"{type(inner).__name__}({(lines or [''])[0]!r})"
