"""Measures of serving: workloads, clients, figures, tables, pages; and how often prompts begin alike."""
