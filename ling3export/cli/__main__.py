"""``python -m ling3export.cli``."""

from ling3export.cli.main import main

if __name__ == "__main__":
    main()
