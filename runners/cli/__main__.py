"""Lets `python -m ling3export.runners.cli` run the command."""

from ling3export.runners.cli.main import main

main()
