"""The ordered steps of one recording. Replay is a `for` loop; no step knows why it is there."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dit_graph.errors import BreakResultChanged, GuardMismatch
from dit_graph.tape.buffers import shares_storage
from dit_graph.tape.guards import DeviceNumber, Guard, matches
from dit_graph.tape.trees import is_size


def spec_of(t: torch.Tensor) -> tuple[Any, ...]:
    return (t.shape, t.stride(), t.dtype, t.device)


def below_autocast(func: Callable[..., Any]) -> Callable[..., Any]:
    """`func`; for an operation, what runs it again as it ran where the watcher saw it."""
    if not isinstance(func, torch._ops.OpOverload):
        return func

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            return func(*args, **kwargs)

    return run


@dataclass(eq=False)
class Break:
    """A call that runs eagerly at every replay, between two segments or on the host.

    `leaves` are its arguments flattened, tensors replaced by what replay may read; `homes` are its
    results flattened, tensors replaced by the memory that later steps read, anything else by the
    value that Python was given.
    """

    fn: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    homes: list[Any]
    results: Any
    reason: str
    where: str
    module: str | None  # The path of the submodule that ran; "" is the module itself.
    marked: bool
    guarded: bool  # It hands a value or a shape to Python, which a replay compares.
    in_place: set[int]  # These results are no new tensors.

    def __post_init__(self) -> None:
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        containers = not all(map(pytree.tree_is_leaf, (*args, *kwargs.values())))
        # The call may change a list or a dict that it is given, so each replay makes its own.
        self._arguments = None if containers else (args, kwargs)
        self._run = below_autocast(self.fn)

    def __call__(self) -> None:
        args, kwargs = self._arguments or pytree.tree_unflatten(self.leaves, self.spec)
        leaves, spec = pytree.tree_flatten(self._run(*args, **kwargs), is_size)
        if spec != self.results:
            self._changed("structure", self.results, spec)
        for i, (home, leaf) in enumerate(zip(self.homes, leaves)):
            if isinstance(home, torch.Tensor):
                self._store(home, leaf, i in self.in_place)
            elif not matches(home, leaf):
                self._changed("value", home, leaf)

    def _store(self, home: torch.Tensor, leaf: Any, in_place: bool) -> None:
        if not isinstance(leaf, torch.Tensor) or spec_of(leaf) != spec_of(home):
            old, new = spec_of(home), isinstance(leaf, torch.Tensor) and spec_of(leaf)
            self._changed("tensor", old, new)
        if leaf.data_ptr() == home.data_ptr():
            return
        if in_place:  # To copy would overwrite an argument, or a weight.
            self._changed("memory", "its input's", "its own")
        home.copy_(leaf)

    def _changed(self, what: str, old: Any, new: Any) -> None:
        error = BreakResultChanged if self.marked else GuardMismatch
        # A stand-in would be pinned by its repr, and the next replay compare its exact value.
        then = old.value if type(old) is DeviceNumber else old
        raise error(
            f"{self.reason} at {self.where}", f"{what} was {then!r} at capture, now {new!r}"
        )


@dataclass(eq=False)
class WholeCall:
    """The whole forward, eagerly, on the staged arguments; `done` gets its result."""

    forward: Callable[[], Any]
    done: Callable[[Any], Any]

    def __call__(self) -> None:
        self.done(self.forward())


@dataclass(eq=False)
class Reset:
    """Puts a constant back that the recorded call writes into."""

    target: torch.Tensor
    value: torch.Tensor

    def __call__(self) -> None:
        self.target.copy_(self.value)


@dataclass(eq=False)
class Tape:
    """One recording: guards, then steps, then the result.

    `held` keeps alive what the segments read and nobody else may keep: constants, and tensors from
    outside. `saved` are tensors from outside that steps write before the last guard inside the
    tape: `run` takes them aside, so that a mismatch leaves nothing moved.
    """

    guards: list[Guard] = field(default_factory=list)
    steps: list[Callable[[], None]] = field(default_factory=list)
    saved: list[torch.Tensor] = field(default_factory=list)
    held: dict[int, torch.Tensor] = field(default_factory=dict)
    written_inputs: list[int] = field(default_factory=list)
    written_outside: set[int] = field(default_factory=set)  # These are addresses of storages.
    leaves: list[Any] = field(default_factory=list)
    spec: Any = None
    random_before_guard: bool = False
    unrestartable: str = ""
    effects: str = ""  # This is why the forward must not run twice for one call, if it must not.
    draws: bool = False  # It draws from a default generator.
    moves_early: bool = False  # It moves what outlives the call before a step of the user's own.
    compared: bool = False  # A replay of it was compared with an eager call, bit for bit.
    generation: Any = None

    def run(self, undo: "Undo", check: Callable[[], None]) -> None:
        """Replay. Raises GuardMismatch or BreakResultChanged with `undo` ready to roll back.

        Args:
            check: raises where the recording is not to answer after all. Called before the first
                step that runs the user's own code, or at the end, while the device works.
        """
        for guard in self.guards:
            guard.check()
        undo.take(self.saved, self.random_before_guard)
        for step in self.steps[: self._users_first]:
            step()
        check()
        for step in self.steps[self._users_first :]:
            step()

    @cached_property
    def _users_first(self) -> int:
        """The first step that runs code of the user's, which may do anything."""
        steps = enumerate(self.steps)
        marked = (i for i, s in steps if isinstance(s, WholeCall) or getattr(s, "marked", False))
        return next(marked, len(self.steps))

    def result(self, given: list[torch.Tensor]) -> Any:
        """What the caller gets: clones, or views of its own arguments, as it was recorded."""
        leaves = [leaf(given) if isinstance(leaf, InputView) else own(leaf) for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def conflict(self, given: list[torch.Tensor]) -> str:
        """Why these arguments cannot be staged apart from each other and from what is written."""
        if self.written_inputs and shares_storage(given):
            return "arguments that share storage are written in place"
        outside = self.written_outside
        if outside and any(t.untyped_storage().data_ptr() in outside for t in given):
            return "an argument lies in memory that the forward writes"
        return ""

    def breaks(self) -> Iterator[Break]:
        return (step for step in self.steps if isinstance(step, Break))

    @property
    def operations(self) -> int:
        """Of the device, in its segments."""
        return sum(getattr(step, "ops", 0) for step in self.steps)

    @property
    def compared_values(self) -> int:
        """Guards, and breaks that hand something to Python."""
        return len(self.guards) + sum(step.guarded for step in self.breaks())


@dataclass(frozen=True)
class InputView:
    """A result that is (a view of) the caller's own argument."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def __call__(self, given: list[torch.Tensor]) -> torch.Tensor:
        base = given[self.index]
        if (self.size, self.stride, self.offset) == (base.shape, base.stride(), 0):
            return base
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


@dataclass(frozen=True)
class External:
    """A result that is a tensor from outside the call, such as a buffer of the module."""

    tensor: torch.Tensor


def own(leaf: Any) -> Any:
    """The caller's own copy of a result leaf, on the current stream."""
    if isinstance(leaf, External):
        return leaf.tensor
    if not isinstance(leaf, torch.Tensor):
        return leaf
    copy = leaf.clone()
    if copy.stride() == leaf.stride() or 0 in leaf.stride():
        return copy
    strided = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return strided.copy_(leaf)


class Undo:
    """Tensors and generators as they were when a call started, in case it must start again."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        self._generators = generators
        self._kept: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self._states: list[Any] = []

    def take(self, tensors: list[torch.Tensor], random: bool) -> None:
        self._kept = [(t, [t.clone()]) for t in tensors]
        self._states = [g.get_state() for g in self._generators] if random else []

    def promise(
        self, tensor: torch.Tensor, later: Callable[[Callable[[], object]], object]
    ) -> None:
        """Take one more tensor, when `later` says that its time has come."""
        kept: list[torch.Tensor] = []
        self._kept.append((tensor, kept))
        later(lambda: kept.append(tensor.clone()))

    def generators_moved(self) -> bool:
        """Whether a generator stands elsewhere than where it was taken."""
        return any(
            not torch.equal(generator.get_state(), state)
            for generator, state in zip(self._generators, self._states)
        )

    def roll_back(self) -> None:
        for tensor, kept in reversed(self._kept):
            if kept:
                tensor.copy_(kept[0])
        for generator, state in zip(self._generators, self._states):
            generator.set_state(state)
