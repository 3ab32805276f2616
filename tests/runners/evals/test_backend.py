"""The engine's backend: the commit that a run's record names."""

import shutil
import subprocess
import sys
from pathlib import Path

from ling3export.runners.evals import backend

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b")


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run([*GIT, *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_a_commit_is_named_only_if_it_holds_the_package(tmp_path):
    """Finding 9: a package in the virtual environment of another project got that project's commit."""
    package = tmp_path / ".venv/ling3export"
    package.mkdir(parents=True)
    file = Path(shutil.copy(backend.__file__, package / "backend.py"))
    assert backend.git_commit(file) is None  # no repository
    (tmp_path / "theirs.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "theirs.py")
    git(tmp_path, "commit", "-q", "-m", "theirs")
    assert backend.git_commit(file) is None
    git(tmp_path, "add", "--force", str(file))
    git(tmp_path, "commit", "-q", "-m", "ours")
    assert backend.git_commit(file) == git(tmp_path, "rev-parse", "HEAD")


def test_without_git_there_is_no_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert backend.git_commit(Path(sys.executable)) is None
