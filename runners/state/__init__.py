"""The state of a sequence, and the prefix cache, which keeps states for later prompts."""
