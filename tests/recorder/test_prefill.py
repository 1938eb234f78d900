"""Prefill on recorder."""

from tests.prefill import *  # noqa: F403
