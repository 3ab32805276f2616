"""What every other room stands on: errors, strict JSON, bounded reading, dtypes, tables, child processes, HLO text."""
