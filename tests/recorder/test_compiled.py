"""Compiled code in a recorded forward on the CPU recorder."""

from tests.compiled import *  # noqa: F403
