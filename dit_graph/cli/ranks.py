"""Lets the processes that `accelerate launch` or `torchrun` started share work and tell each other.

It knows no pipeline. A process alone does not load accelerate and waits for nobody.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch

from dit_graph.cli import errors
from dit_graph.cli.errors import UsageError, one_line
from dit_graph.embedded import UnknownConcept

T = TypeVar("T")

_PATIENCE = timedelta(days=30)
"""One waits so long for another. The launcher ends all when one dies, so this need not."""


@dataclass(frozen=True)
class Processes:
    """Place this process among all that were launched; without arguments it is the only one.

    What takes all of them (`gather`, `together`) must be called by every process, in the same
    order. `device` is what `cuda` is to this process.
    """

    rank: int = 0
    count: int = 1
    device: str = "cuda"

    @property
    def is_main(self) -> bool:
        """Say whether this is the one that speaks for all."""
        return self.rank == 0

    @property
    def names(self) -> list[str]:
        """Name all processes as messages call them, in the order of `gather`."""
        return [f"process {rank + 1} of {self.count}" for rank in range(self.count)]

    def mine(self, items: Sequence[T]) -> list[T]:
        """Take this process's part of `items`: each item is one process's, in order."""
        if self.count == 1:
            return list(items)
        from accelerate.state import PartialState

        with PartialState().split_between_processes(list(items)) as part:
            return list(part)

    def gather(self, value: T) -> list[T]:
        """Collect the values of all processes in their order. They must be picklable."""
        if self.count == 1:
            return [value]
        from accelerate.utils.operations import gather_object

        return list(gather_object([value]))

    def leave(self) -> None:
        """Go when all go. Nothing can be asked of the others after this."""
        self.gather(None)
        if self.count > 1:
            from accelerate.state import PartialState

            PartialState().destroy_process_group()  # Else gloo's threads can abort the exit.

    def failure(self, do: Callable[[], None]) -> str:
        """Do it, and say in one line why it failed, if it did; where this is alone, raise.

        So a process whose part fails still comes to where the others wait for it.
        """
        try:
            do()
        except Exception as error:
            if self.count == 1:
                raise
            if isinstance(error, (UsageError, UnknownConcept)):
                return one_line(error)
            traceback.print_exc()  # The user made no mistake, so all that is known is said here.
            return f"{type(error).__name__}: {one_line(error)}"
        return ""

    def together(self, make: Callable[[], T]) -> T:
        """Give what `make` makes here, once it has made something in every process.

        Raises:
            UsageError: it failed somewhere.
        """
        made: list[T] = []
        if line := self.summary(self.gather(self.failure(lambda: made.append(make())))):
            raise UsageError(line)
        return made[0]

    def summary(self, failures: Sequence[str]) -> str:
        """Make one line of the `failure` of each; what all have is said once, without a name."""
        if len(set(failures)) == 1:
            return failures[0]
        return "; ".join(f"{name}: {line}" for name, line in zip(self.names, failures) if line)


def join() -> Processes:
    """Join the processes that the environment tells of.

    Objects go over gloo on GPUs too: a device that has failed cannot keep its process from saying
    so. accelerate makes the process's own GPU the current one.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) < 2 or "RANK" not in os.environ:
        return Processes()
    from accelerate.state import PartialState

    state: Any = PartialState(cpu=not torch.cuda.is_available(), backend="gloo", timeout=_PATIENCE)
    return Processes(state.process_index, state.num_processes, str(state.device))


def exit_code(command: str, run: Callable[[Processes], None]) -> int:
    """Run a command line in every process: 0, 2 after an error that the main one told, 130.

    All leave together: a launcher ends the others as soon as one has left with an error, and by
    then the main process must have spoken.
    """
    processes = join()
    code = errors.exit_code(command, lambda: run(processes), processes.is_main)
    sys.stdout.flush()
    if code != 130:  # Who is interrupted does not come to where the others wait.
        processes.leave()
    return code
