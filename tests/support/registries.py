"""Servers that have catalogues: Debian's registry, and Python's own web server, each on loopback."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.support.hosting import free_port

# For the one user `me` of a registry that asks; the password is `secret`.
HTPASSWD = "me:$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n"
CONFIG = """version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}/registry}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@contextmanager
def listening(port: int, folder: Path, *command: object) -> Iterator[str]:
    """A server on loopback, once it answers; ended with the block."""
    with (
        open(folder / "server.log", "w") as log,
        subprocess.Popen(
            [str(word) for word in command], cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        ) as process,
    ):
        try:
            until = time.monotonic() + 60
            while not _answers(f"http://127.0.0.1:{port}/v2/"):
                assert process.poll() is None and time.monotonic() < until, (folder / "server.log").read_text()
                time.sleep(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        urlopen(url, timeout=5).close()
    except HTTPError:
        return True
    except OSError:
        return False
    return True


@contextmanager
def docker_registry(folder: Path, more: str = "") -> Iterator[str]:
    """Debian's docker-registry, on loopback."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("no docker-registry here: apt-get install docker-registry, as .ci/run does")
    port = free_port()
    (folder / "config.yml").write_text(CONFIG.format(folder=folder, port=port) + more)
    with listening(port, folder, program, "serve", folder / "config.yml") as host:
        yield host


@contextmanager
def web_server(folder: Path) -> Iterator[str]:
    """``http://…`` of ``python -m http.server`` over a folder; it knows no ranges."""
    port = free_port()
    with listening(
        port, folder.parent, sys.executable, "-m", "http.server", port, "--bind", "127.0.0.1", "--directory", folder
    ) as host:
        yield f"http://{host}"
