"""What a kind of workload brings to the one Runner, as data and small helpers."""
