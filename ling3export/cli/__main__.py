"""``ling3export``, also as ``python -m ling3export.cli``."""

from ling3export.foundation.starting import start


def run() -> None:
    """Runs the command line."""
    start("ling3export.cli.main")


if __name__ == "__main__":
    run()
