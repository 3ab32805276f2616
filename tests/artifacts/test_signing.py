"""Signatures: the signature is checked before anything of an artifact except its manifest is read."""

import base64
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from ling3export.artifacts import signing, store
from ling3export.artifacts.files import TRUST
from ling3export.artifacts.manifest import MANIFEST
from ling3export.artifacts.signing import SIGNATURES, make_key, public_path, read_signatures, sign
from ling3export.cli import main as cli
from ling3export.compile import attach as attaching
from ling3export.compile import into as adding
from ling3export.compile.build import DEMO
from ling3export.foundation.errors import ArtifactError, TrustError
from ling3export.runners.cli import main as runner_cli
from ling3export.runners.engine.engine import Engine
from ling3export.runners.load import loader, programs
from tests.support import toy_artifact
from tests.support.catalog_kills import contents
from tests.support.manifests import noted
from tests.support.refusals import refusal, said, succeeded


@pytest.fixture
def key(tmp_path) -> Path:
    make_key(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def trusted(tmp_path, key, monkeypatch) -> Path:
    """The folder of trusted keys, with one key."""
    (tmp_path / "trusted").mkdir()
    monkeypatch.setenv(TRUST, str(tmp_path / "trusted"))
    return Path(shutil.copy(public_path(key), tmp_path / "trusted")).parent


@pytest.fixture
def untouched(monkeypatch) -> None:
    """Fails the test if a program is read or a weight file mapped."""

    def refused(*arguments, **options):
        raise AssertionError("something was loaded")

    monkeypatch.setattr(programs, "read_executables", refused)
    monkeypatch.setattr(store.Store, "__init__", refused)


def other_key(folder: Path) -> Path:
    make_key(folder / "other")
    return folder / "other"


def flipped(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def edited(toy: Path, change: Callable[[dict], object]) -> None:
    raw = json.loads((toy / SIGNATURES).read_text())
    change(raw)
    (toy / SIGNATURES).write_text(json.dumps(raw))


def test_a_good_signature_lets_it_run(toy, key, trusted, capsys):
    name = sign(toy, key)
    with Engine(toy) as engine:
        toy_artifact.check_tokens(engine)
    assert f"x.ling3: signed by {name}\n" in capsys.readouterr().err


# The manifest's bytes decide: each of these is refused before a program is deserialized or a weight file mapped.
UNTRUSTED = {
    "none": (lambda toy, key, folder: None, "found none, in "),
    "wrong key": (lambda toy, key, folder: sign(toy, other_key(folder)), "found one by "),
    "removed key": (
        lambda toy, key, folder: (
            sign(toy, key),
            shutil.copy(public_path(other_key(folder)), folder / "trusted"),
            (folder / "trusted" / "key.pub").unlink(),
        ),
        "found one by ",
    ),
    "changed manifest": (
        lambda toy, key, folder: (sign(toy, key), noted(toy, "changed")),
        "that is not of this manifest.json",
    ),
    "another artifact's": (
        lambda toy, key, folder: (
            noted(toy, "changed"),
            sign(toy, key),
            shutil.copy(toy_artifact.shared() / MANIFEST, toy),
        ),
        "that is not of this manifest.json",
    ),
    "truncated": (
        lambda toy, key, folder: (sign(toy, key), edited(toy, lambda raw: raw["signatures"][0].update(ed25519="AAAA"))),
        f'{SIGNATURES} `signatures[0].ed25519`: expected 64 bytes in base64, found "AAAA"',
    ),
    "garbage": (
        lambda toy, key, folder: (toy / SIGNATURES).write_bytes(bytes(range(256))),
        f"{SIGNATURES}: expected JSON, found ",
    ),
    "unreadable key": (
        lambda toy, key, folder: (sign(toy, key), (folder / "trusted" / "a.pem").mkdir()),
        "key `a.pem`: expected a readable file, found a folder",
    ),
}


@pytest.mark.parametrize("case", UNTRUSTED)
def test_an_artifact_without_a_trusted_signature_is_refused_before_loading(
    case, toy, key, trusted, untouched, tmp_path
):
    change, message = UNTRUSTED[case]
    change(toy, key, tmp_path)
    with pytest.raises(TrustError) as caught:
        loader.load(toy)
    assert message in caught.value.message


@pytest.mark.parametrize(("pattern", "what"), [("*.exec", "file `programs/"), ("*.safetensors", "tensor `toy.table`")])
def test_a_changed_program_or_weight_does_not_run_though_the_signature_is_good(pattern, what, toy, key, trusted):
    sign(toy, key)
    flipped(next((toy / ("weights" if pattern == "*.safetensors" else "programs")).rglob(pattern)))
    with pytest.raises(ArtifactError) as caught:
        loader.load(toy, report=lambda text: None)
    assert caught.value.message.startswith(what)


def test_one_good_signature_of_two_is_enough(toy, key, trusted, tmp_path):
    sign(toy, key)
    sign(toy, other_key(tmp_path))
    assert len(read_signatures(toy)) == 2
    said: list[str] = []
    loader.load(toy, report=said.append)
    (line,) = (line for line in said if line.startswith("x.ling3: "))
    assert line.startswith("x.ling3: signed by ") and "not checked" not in line


def test_a_key_signs_once_and_again_what_has_changed(toy, key, trusted):
    sign(toy, key)
    noted(toy, "changed")
    sign(toy, key)
    assert len(read_signatures(toy)) == 1
    loader.load(toy, report=lambda text: None)


def test_without_trusted_keys_one_line_says_who_claims_to_have_signed(toy, key, capsys):
    changes = {
        "unsigned": lambda: None,
        "signed by {}, not checked": lambda: sign(toy, key),
        f"{SIGNATURES} is damaged, not checked": lambda: (toy / SIGNATURES).write_text("{"),
    }
    for words, change in changes.items():
        name = change()
        loader.load(toy)
        assert capsys.readouterr().err == f"x.ling3: {words.format(name)}\n"


def test_keys_of_another_kind_and_weights_without_digests_are_refused(toy, key, trusted):
    sign(toy, key)
    with pytest.raises(ArtifactError, match="--check: expected all or copy where keys are trusted, found programs"):
        loader.load(toy, check="programs")
    shutil.copy(key, trusted / "private.pem")
    with pytest.raises(TrustError, match=r"key `private.pem`: expected a public Ed25519 key"):
        loader.load(toy)
    with pytest.raises(TrustError, match=r"key `key.pub`: expected a private Ed25519 key"):
        sign(toy, public_path(key))


def test_the_command_line_makes_keys_signs_and_trusts(toy, tmp_path, monkeypatch):
    key, keys = tmp_path / "k", tmp_path / "keys"
    made = said(cli.main, "keygen", key)
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
    before = key.read_bytes()
    assert "expected a writable file, found File exists" in refusal(cli.main, "keygen", key)
    assert key.read_bytes() == before
    (tmp_path / "half.pub").write_text("another's")
    assert "write `half.pub`: expected a writable file, found File exists" in refusal(
        cli.main, "keygen", tmp_path / "half"
    )
    assert not (tmp_path / "half").exists() and (tmp_path / "half.pub").read_text() == "another's"
    keys.mkdir()
    shutil.copy(public_path(key), keys)
    command = ["generate", str(toy), "--prompt-ids", "1,2", "--max-tokens", "1"]
    monkeypatch.setenv(TRUST, str(keys))
    assert "expected a signature by" in refusal(runner_cli.main, *command)
    assert said(cli.main, "sign", toy, "--key", key) == made
    assert f"signed by {made.strip()}\n" in succeeded(runner_cli.main, *command).stderr
    verified = succeeded(cli.main, "verify", toy, "--no-run")
    assert f"signed by {made.strip()}\n" in verified.stderr


def test_keygen_on_a_full_disk_leaves_nothing_that_stops_the_next_one(tmp_path):
    """Regression: a failed keygen left empty files, which made the next one fail."""
    words = [sys.executable, "-m", "ling3export", "keygen", str(tmp_path / "k")]
    full = subprocess.run(["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *words], capture_output=True, text=True)
    assert full.returncode == 1 and "error: write `k`: expected room, found a file-size limit of 0 bytes" in full.stderr
    assert not [*tmp_path.iterdir()]
    assert subprocess.run(words, capture_output=True).returncode == 0


def test_keygen_that_is_interrupted_leaves_no_half_of_a_pair(tmp_path, monkeypatch):
    """Regression: Ctrl-C left the first key of a pair, which made the next keygen fail."""
    create = signing.create

    def interrupted(path, mode):
        if path.suffix == ".pub":
            raise KeyboardInterrupt
        return create(path, mode)

    monkeypatch.setattr(signing, "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_key(tmp_path / "k")
    assert not [*tmp_path.iterdir()]


def test_an_empty_name_for_the_trusted_keys_is_an_error(toy, key, monkeypatch):
    """Regression: with ``LING3_TRUST=""`` nothing was checked."""
    sign(toy, key)
    monkeypatch.chdir(key.parent)
    command = ["generate", str(toy), "--prompt-ids", "1,2", "--max-tokens", "1"]
    monkeypatch.setenv(TRUST, "")
    assert f"error: {TRUST}: expected a folder of public keys, found an empty value" in refusal(
        runner_cli.main, *command
    )
    with pytest.raises(TrustError, match="found an empty value"):
        loader.load(toy)


def test_the_build_side_and_doctor_take_no_artifact_that_no_trusted_key_signed(toy, trusted, monkeypatch):
    """Regression: ``attach`` and ``build --into`` ran such an artifact's programs, and ``doctor`` reported a fit."""
    for name, place in (("receipts", attaching), ("compiling", adding)):
        monkeypatch.setattr(place, name, lambda *arguments, **options: pytest.fail("something was run"))
    unsigned = "error: artifact `x.ling3`: expected a signature by "
    before = contents(toy)
    for command in (("attach", toy, DEMO, "--force"), ("build", "--into", toy, "--target", "cpu@4")):
        assert refusal(cli.main, *command).startswith(unsigned)
    done = CliRunner().invoke(runner_cli.main, ["doctor", str(toy)])
    assert done.exit_code == 1 and done.stdout.endswith(f"{toy}: does not run here\n")
    assert f"fault: {unsigned.removeprefix('error: ')}" in done.stdout and "mend: do not run it" in done.stdout
    assert contents(toy) == before


# Functions that read a manifest without checking its signature, each with the reason.
UNASKED = {
    "artifacts/catalog/publish.py": "bytes that were verified just before are copied",
    "artifacts/signing.py": "the door itself, and what signs",
    "artifacts/staging.py": "whether there is an artifact to add to",
    "ling3export/cli/catalog.py": "compares a digest with an evaluation's",
    "ling3export/cli/graph.py": "reads programs as text; nothing runs",
    "ling3export/cli/main.py": "inspect shows what a manifest says",
    "ling3export/compile/into.py": "whether an addition that failed had replaced it",
    "ling3export/opened.py": "opens programs as text; nothing runs",
    "ling3export/report/compared.py": "compares programs as text; nothing runs",
    "runners/batch/run.py": "sizes of the artifact that its engines then open with trust",
    "runners/bench_serving/measure.py": "tokenizes prompts with it; what runs it asks",
}


def test_every_other_reader_of_a_manifest_goes_through_the_door_that_checks_trust():
    """Regression: ``attach``, ``build --into`` and ``doctor`` opened artifacts without the check."""
    root = Path(__file__).parents[2]
    found = {
        str(path.relative_to(root))
        for room in ("artifacts", "foundation", "machine", "model", "runners", "ling3export")
        for path in (root / room).rglob("*.py")
        if re.search(r"(?<!def )read_manifest\(", path.read_text())
    }
    assert found == {*UNASKED}


def test_trusted_keys_without_the_package_that_reads_them_are_refused_by_name(toy, trusted, monkeypatch):
    """Regression: with LING3_TRUST set, commands ended in an ImportError."""
    monkeypatch.setattr("ling3export.foundation.extras.find_spec", lambda name: None)
    found = refusal(runner_cli.main, "generate", toy, "--prompt-ids", "1,2", "--max-tokens", "1")
    assert "error: trusted keys: expected the packages of the extra `sign`, found no cryptography\n" in found


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_openssl_reads_the_keys_and_checks_the_signature_of_the_plain_bytes(toy, key, tmp_path):
    sign(toy, key)
    (tmp_path / "raw").write_bytes(base64.b64decode(read_signatures(toy)[0].ed25519))
    given = f"-inkey {public_path(key)} -rawin -in {toy / MANIFEST} -sigfile {tmp_path / 'raw'}"
    checked = f"openssl pkeyutl -verify -pubin {given}".split()
    assert subprocess.run(checked, capture_output=True).returncode == 0
    flipped(toy / MANIFEST, 10)
    assert subprocess.run(checked, capture_output=True).returncode != 0
