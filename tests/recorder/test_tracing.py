"""The suite on exporters, tracers and counters, on the CPU recorder."""

from tests.tracing import *  # noqa: F403
