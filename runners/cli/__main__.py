"""``ling3-runner``, also as ``python -m ling3export.runners.cli``."""

from ling3export.foundation.starting import start


def run() -> None:
    """Runs the command line."""
    start("ling3export.runners.cli.main")


if __name__ == "__main__":
    run()
