"""The base of every other room: errors, strict JSON, bounded reading, dtypes, tables, child processes, HLO text."""
