"""The build cache: cells by the sources and options that decide them, programs by their StableHLO."""
