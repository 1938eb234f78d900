"""The suite on exporters, tracers and counters, on CUDA."""

from tests.tracing import *  # noqa: F403
