"""What a recording stands on beside its call: Python state and weights, compared and put back."""
