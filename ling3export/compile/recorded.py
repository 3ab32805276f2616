"""The start of a compiling process: the sources that it imports are noted first, for the keys of what it makes."""

import importlib

from ling3export.foundation import sources

if __name__ == "__main__":
    sources.record()
    importlib.import_module("ling3export.compile.worker").main()
