"""Evaluation: tasks, graders, trials, runs and their reports."""
