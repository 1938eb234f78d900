"""Threads on CUDA."""

from tests.threads import *  # noqa: F403
