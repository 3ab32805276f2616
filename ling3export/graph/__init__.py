"""Graph tooling: a compiled or portable program as a list of operations with their layers, costs and times."""
