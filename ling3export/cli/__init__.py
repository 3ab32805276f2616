"""The command line of the build side."""
