"""The command lines: `explain`, and the parts of `generate` (options, model, files) and `prefill`
(prefill, lm, tokens)."""
