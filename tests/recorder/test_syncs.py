"""`remove_syncs` on the recorder."""

from tests.syncs import *  # noqa: F403
