"""The bytes that this process's modules were made of: a source may change between its import and a look at the file."""

import hashlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

IMPORTED: dict[str, str] = {}  # the sha256 of each source, by its path, once `record` was called


def record() -> None:
    """From now on, modules of this package are compiled from their sources, and these are noted in IMPORTED."""
    sys.meta_path.insert(0, _Finder())


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith("ling3export.") else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        data = self.get_data(path)
        IMPORTED[path] = hashlib.sha256(data).hexdigest()
        code: CodeType = self.source_to_code(data, path)
        return code
