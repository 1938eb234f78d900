"""Prefill: a causal LM's transformer body on tokens padded to buckets."""
