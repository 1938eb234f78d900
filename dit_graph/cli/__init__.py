"""Holds the command lines.

`generate`, `explain` and `prefill` each own a command: its options, `parser`, `parse` and `main`;
`bench/options.py` does the same. What they share is in `parser`, `options`, `errors` and `graphed`;
`model`, `files` and `pictures` know pipelines, `lm` and `tokens` causal LMs, `ranks` launchers.
"""
