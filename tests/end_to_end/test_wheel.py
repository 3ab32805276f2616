"""The content of a wheel and a source distribution: every file of the five packages, and no generic top-level name."""

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.package_copy import PARTS, copied

pytestmark = pytest.mark.install


def build(kind: str, source: Path, out: Path) -> Path:
    """Builds a ``wheel`` or an ``sdist`` of ``source`` into ``out``, without isolation and so without network."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, out], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def expected_files(source: Path) -> set[str]:
    """Installed name of every file in the five folders; the symlinks in ling3export/ are not followed."""
    names = set()
    for part, installed in PARTS.items():
        for folder, _, files in os.walk(source / part):
            names |= {str(installed / (Path(folder) / file).relative_to(source / part)) for file in files}
    return names


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return copied(tmp_path_factory.mktemp("package") / "source")


@pytest.fixture(scope="module")
def wheel(source) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", source, source.parent))


def test_wheel_holds_every_file_of_the_packages(wheel, source):
    packaged = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packaged == expected_files(source)


def test_wheel_has_one_top_level_name(wheel):
    assert {re.sub(r"-.*", "", name.split("/")[0]) for name in wheel.namelist()} == {"ling3export"}


def test_wheel_metadata(wheel):
    def text(name: str) -> str:
        (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
        return wheel.read(path).decode()

    metadata = email.message_from_string(text("METADATA"))
    needs = {re.split(r"[<>=]", need)[0] for need in metadata.get_all("Requires-Dist") or [] if "extra ==" not in need}
    assert needs == {"jax", "flatbuffers", "numpy", "safetensors", "tokenizers", "click", "jinja2", "msgspec"}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in text("licenses/LICENSE")
    assert "Tag: py3-none-any" in text("WHEEL")
    assert text("entry_points.txt").split("\n")[:3] == [
        "[console_scripts]",
        "ling3-runner = ling3export.runners.cli.__main__:run",
        "ling3export = ling3export.cli.__main__:run",
    ]


def test_source_distribution_builds_the_same_wheel(wheel, source, tmp_path):
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (folder for folder in tmp_path.iterdir() if folder.is_dir())
    with zipfile.ZipFile(build("wheel", unpacked, tmp_path)) as again:
        assert sorted(again.namelist()) == sorted(wheel.namelist())
