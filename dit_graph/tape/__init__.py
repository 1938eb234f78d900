"""What replays: steps, guards, staged arguments, results. Knows no device and no model."""
