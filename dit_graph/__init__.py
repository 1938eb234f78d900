"""Records the repeated forward of a DiT once per signature as CUDA graphs and replays it."""

from dit_graph.breaks import CurrentCall, break_graph, current_call, eager_on_graph
from dit_graph.config import GraphConfig
from dit_graph.enable import disable, enable
from dit_graph.errors import (
    AlreadyEnabled,
    BreakResultChanged,
    CaptureError,
    ConfigError,
    DeviceFailed,
    DitGraphError,
    GuardMismatch,
    NewShape,
    NotEnabled,
    NotReplayed,
    Unsupported,
)
from dit_graph.handle import Handle

__all__ = [
    "AlreadyEnabled",
    "BreakResultChanged",
    "CaptureError",
    "ConfigError",
    "CurrentCall",
    "DeviceFailed",
    "DitGraphError",
    "GraphConfig",
    "GuardMismatch",
    "Handle",
    "NewShape",
    "NotEnabled",
    "NotReplayed",
    "Unsupported",
    "break_graph",
    "current_call",
    "disable",
    "eager_on_graph",
    "enable",
]

__version__ = "0.1.0"
