"""``python -m ling3export``."""

from ling3export.cli.main import main

main(prog_name="ling3export")
