"""Explains what is recorded, as text, as plain dicts and as a picture.

It reads recordings and changes nothing. It times steps only when it is asked to, because that runs
them.
"""

from dit_graph.explain.facts import (
    Explanation,
    ExternalRead,
    GuardedValue,
    HandedValue,
    Module,
    Signature,
    Step,
    Variant,
)
from dit_graph.explain.read import explain
from dit_graph.explain.syncs import HostSync, host_syncs

__all__ = [
    "Explanation",
    "ExternalRead",
    "GuardedValue",
    "HandedValue",
    "HostSync",
    "Module",
    "Signature",
    "Step",
    "Variant",
    "explain",
    "host_syncs",
]
