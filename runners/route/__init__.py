"""A router before servers that prefill, servers that decode, and servers that do both."""
