"""Threads on the recorder."""

from tests.threads import *  # noqa: F403
