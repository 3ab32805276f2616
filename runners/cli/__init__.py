"""The command `ling3-runner`."""
