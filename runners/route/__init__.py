"""A router before servers for prefill, for decode, and for both."""
