"""The exceptions, as one tree.

DitGraphError
├── ConfigError            an option has a value that cannot work
├── AlreadyEnabled         the module is graphed with another config
├── NotEnabled             disable or a handle's method met a target that is not graphed
├── Unsupported            this module or machine cannot be graphed at all
├── NewShape               on_new_shape="error" met a signature that was not warmed up
├── NotReplayed            strict=True met a call that was answered eagerly
├── DeviceFailed           the device failed in a capture or replay and answers nothing any more
├── BreakResultChanged     a marked break gave a result of another form than at capture
├── GuardMismatch          a recorded value differs in this call (handled by the runner)
└── CaptureError           a forward could not be recorded (handled by the runner)
    ├── Collective         the forward talks with other processes
    ├── Conflict           the arguments share memory that is written
    └── Unkeyable          an argument has no value to compare
"""


class DitGraphError(Exception):
    """Something in dit_graph went wrong."""


class ConfigError(DitGraphError, ValueError):
    """An option had a value that cannot work."""


class AlreadyEnabled(DitGraphError, RuntimeError):
    """The module was already graphed with another config."""


class NotEnabled(DitGraphError, RuntimeError):
    """The target was not graphed."""


class Unsupported(DitGraphError, RuntimeError):
    """The module or the machine cannot be graphed at all."""


class NewShape(DitGraphError, RuntimeError):
    """A signature arrived that was not warmed up, and on_new_shape is "error"."""


class NotReplayed(DitGraphError, RuntimeError):
    """A call was neither replayed nor recorded, and strict is on; the message is the reason."""


class DeviceFailed(DitGraphError, RuntimeError):
    """The device failed for good, as after an illegal address; the first cause is `__cause__`."""


class _AtReplay(DitGraphError, RuntimeError):
    """Something differed from the recording; `place` names it without this call's values."""

    def __init__(self, place: str, detail: str) -> None:
        super().__init__(f"{place}: {detail}")
        self.place = place


class BreakResultChanged(_AtReplay):
    """A marked break gave a result of another form than at capture."""


class CaptureError(DitGraphError, RuntimeError):
    """A forward could not be recorded; the message is the reason that is counted and reported."""


class Collective(CaptureError):
    """A forward came to an operation that all processes take part in; it has not run."""


class Conflict(CaptureError):
    """The arguments of a call shared memory in a way that staging would take apart."""


class Unkeyable(CaptureError):
    """A call had an argument that cannot be compared with another call's."""


class StateChanged(DitGraphError):
    """The module is in another state than the recording that was replayed; nothing was moved."""


class GuardMismatch(_AtReplay):
    """A value that recording handed to Python is another one in this call."""
