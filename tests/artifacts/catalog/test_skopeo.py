"""skopeo copies a version to a registry, and back into another layout."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from ling3export.artifacts.catalog.layout import OciLayout
from ling3export.artifacts.catalog.publish import Words, publish
from ling3export.artifacts.catalog.pull import pull, verify
from tests.support.catalog_kills import contents
from tests.support.hosting import free_port

CONFIG = """version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}/registry}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Debian's docker-registry on loopback."""
    for program in ("skopeo", "docker-registry"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on this machine: apt-get install {program}, as .ci/run does")
    port, config, log = free_port(), tmp_path / "config.yml", tmp_path / "registry.log"
    config.write_text(CONFIG.format(folder=tmp_path, port=port))
    with open(log, "w") as out:
        process = subprocess.Popen(
            ["docker-registry", "serve", config], stdout=out, stderr=out, stdin=subprocess.DEVNULL
        )
    try:
        deadline = time.monotonic() + 60
        while not _answers(f"http://127.0.0.1:{port}/v2/"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        urlopen(url, timeout=5).close()
    except URLError:
        return False
    return True


def copy(source: str, destination: str, *options: str) -> None:
    words = ["skopeo", "--insecure-policy", "copy", "--quiet", "--preserve-digests", *options, source, destination]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.extras
def test_skopeo_copies_a_version_to_a_registry_and_back(toy: Path, tmp_path: Path, registry: str):
    """The command in docs/share.md: the manifest names every byte by digest, so the copy is the same version."""
    store, back, out = OciLayout(tmp_path / "store"), OciLayout(tmp_path / "back"), tmp_path / "out.ling3"
    published = publish(toy, store, "toy", "1.0.0", Words(tags=("demo",))).version
    copy(f"{store}:toy:1.0.0", f"docker://{registry}/toy:1.0.0", "--dest-tls-verify=false")
    copy(f"docker://{registry}/toy:1.0.0", f"{back}:toy:1.0.0", "--src-tls-verify=false")
    found = back.find("toy")
    assert found == published and verify(back, found) == found.record.size
    pull(back, found, out)
    assert contents(out) == contents(toy)
    assert back.gc() == (0, 0)
