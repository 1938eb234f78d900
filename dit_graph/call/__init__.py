"""Which recording is this call's: the call as a key, and what makes two calls the same."""
