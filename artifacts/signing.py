"""Signers of an artifact: detached Ed25519 signatures of manifest.json, which names every other byte by digest.

``manifest.json.sig`` stands next to the manifest and may hold signatures of several keys. Where keys are trusted, one
of them must have signed the very bytes that are then read; nothing else of the artifact is touched before.
"""

import base64
import binascii
import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from ling3export.artifacts.files import TRUST, create, open_regular, remove, replace_file, writing
from ling3export.artifacts.manifest import MANIFEST, read_manifest
from ling3export.artifacts.records import Record, at_most, expect, from_json, laid_out, one_of, reading, to_json
from ling3export.artifacts.schema import Manifest
from ling3export.foundation.errors import ArtifactError, TrustError, listed
from ling3export.foundation.extras import require
from ling3export.foundation.reading import read_bytes
from ling3export.foundation.strict_json import LARGEST, parse_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

SIGNATURES = "manifest.json.sig"
SCHEMA = "ling3.signatures/1"
GIVEN = f"name the folder of the makers' public keys with {TRUST}"
LARGEST_KEY = 16 << 10  # bytes of a PEM file; one of Ed25519 has about 120
KeyId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z", description="16 hex digits")]


def _is_signature(text: str) -> bool:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return False
    return len(data) == 64 and base64.b64encode(data).decode() == text


class Signature(Record, frozen=True):
    """An Ed25519 signature of the manifest's bytes, and the begin of the sha256 of the key that it claims."""

    key: KeyId
    ed25519: str

    def __post_init__(self) -> None:
        expect(_is_signature(self.ed25519), "64 bytes in base64", self.ed25519, "ed25519")


class Signatures(Record, frozen=True):
    """The file ``manifest.json.sig``."""

    schema: Annotated[str, one_of(SCHEMA)]
    signatures: Annotated[tuple[Signature, ...], at_most(64)]


def key_id(key: "Ed25519PublicKey") -> str:
    """A key's id: the first 16 hex digits of the sha256 of its 32 bytes."""
    return sha256(key.public_bytes_raw()).hexdigest()[:16]


def read_signatures(folder: Path) -> tuple[Signature, ...]:
    """The signatures next to an artifact's manifest; none where there is no such file.

    Raises:
        ArtifactError: The file is no regular one, or not of this form.
    """
    if not os.path.lexists(folder / SIGNATURES):
        return ()
    with open_regular(folder, SIGNATURES, SIGNATURES) as file:
        data = file.read(LARGEST + 1)
    with reading(SIGNATURES, folder, TrustError, "sign the artifact again: ling3export sign ARTIFACT --key KEY"):
        return from_json(Signatures, parse_json(data, 64 << 10)).signatures


def make_key(path: Path) -> str:
    """Writes a new private key, which only its owner can read, and ``NAME.pub`` next to it; returns the key's id.

    Both are PEM files as openssl writes them.

    Raises:
        ArtifactError: One is there, or cannot be written.
    """
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    public = private.public_key()
    secret = private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    known = public.public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    made: list[Path] = []
    try:
        for name, data, mode in ((path, secret, 0o600), (public_path(path), known, 0o644)):
            with writing(name), open(create(name, mode), "wb") as file:
                made.append(name)
                file.write(data)
    except BaseException:
        for name in made:  # half a pair would be in the way of the next one
            remove(name)
        raise
    return key_id(public)


def public_path(path: Path) -> Path:
    """Where the public half of a key that :func:`make_key` wrote is."""
    return path.with_name(f"{path.name}.pub")


def sign(artifact: Path, key: Path) -> str:
    """Signs an artifact's manifest, in place of an earlier signature by the same key; returns the key's id.

    Raises:
        ArtifactError: The artifact's manifest is damaged, or the disk is full.
        TrustError: The key cannot be read, or is no private Ed25519 key without a password.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    seen: list[bytes] = []
    read_manifest(artifact, seen.append)
    private: Ed25519PrivateKey = _loaded(key, "private", Ed25519PrivateKey, lambda pem: load_pem_private_key(pem, None))
    name = key_id(private.public_key())
    new = Signature(name, base64.b64encode(private.sign(seen[0])).decode())
    others = [signature for signature in read_signatures(artifact) if signature.key != name]
    body = to_json(Signatures(SCHEMA, (*others, new)))
    replace_file(artifact / SIGNATURES, (laid_out(body) + "\n").encode())
    return name


def trusted_folder() -> Path | None:
    """The folder of trusted keys that LING3_TRUST names; None where it is not set.

    Raises:
        TrustError: It is set and empty, which could be meant as anything.
    """
    if (folder := os.environ.get(TRUST)) == "":
        raise TrustError(
            f"{TRUST}: expected a folder of public keys, found an empty value", f"name one, or unset {TRUST}"
        )
    return None if folder is None else Path(folder)


def read_trusted(artifact: Path, report: Callable[[str], None], name: str | None = None) -> Manifest:
    """The manifest of an artifact, signed by a key of the folder that LING3_TRUST names, if it names one.

    Args:
        report: Told who signed it, and whether that was checked.
        name: Its name in messages; by default its folder's name.

    Raises:
        ArtifactError: The manifest is damaged.
        TrustError: Keys are trusted, and none of them signed it; or they cannot be read.
    """
    folder, name = trusted_folder(), name or artifact.name
    if folder is not None:
        keys = read_keys(folder)
        return read_manifest(artifact, lambda data: report(f"{name}: signed by {check(artifact, data, keys, name)}"))
    manifest = read_manifest(artifact)
    try:
        named = [signature.key for signature in read_signatures(artifact)]
    except ArtifactError:
        state = f"{SIGNATURES} is damaged, not checked"
    else:
        state = f"signed by {listed(named)}, not checked" if named else "unsigned"
    report(f"{name}: {state}")
    return manifest


def check(artifact: Path, data: bytes, keys: "Mapping[str, Ed25519PublicKey]", name: str) -> str:
    """The signers of the bytes of an artifact's manifest, among the trusted ``keys``.

    Raises:
        TrustError: Nobody.
    """
    from cryptography.exceptions import InvalidSignature

    signatures = read_signatures(artifact)
    for signature in signatures:
        if signature.key in keys:
            try:
                keys[signature.key].verify(base64.b64decode(signature.ed25519), data)
            except InvalidSignature:
                continue
            return signature.key
    wrong = [signature.key for signature in signatures if signature.key in keys]
    what = "none"
    if wrong:
        what = f"one by {wrong[0]} that is not of this {MANIFEST}"
    elif signatures:
        what = f"one by {listed([signature.key for signature in signatures])}"
    raise TrustError(
        f"artifact `{name}`: expected a signature by {listed(sorted(keys))}, found {what}, in {artifact}",
        "do not run it, unless you know who made it: then add the maker's public key to the trusted ones",
    )


def read_keys(folder: Path) -> "dict[str, Ed25519PublicKey]":
    """The public keys of a folder, its files ``*.pub`` and ``*.pem``, by their ids.

    Raises:
        TrustError: There is none, or one cannot be read or is no public Ed25519 key. A key must not be left out in
            silence.
    """
    require("trusted keys", "sign", "cryptography", kind=TrustError)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        names = sorted(file.name for file in folder.iterdir() if file.suffix in (".pub", ".pem"))
    except OSError as error:
        raise TrustError(f"trusted keys: expected a folder, found {error.strerror}, at {folder}", GIVEN) from error
    if not names:
        raise TrustError(f"trusted keys: no file *.pub or *.pem, in {folder}", GIVEN)
    by_id = {}
    for name in names:
        key: Ed25519PublicKey = _loaded(folder / name, "public", Ed25519PublicKey, load_pem_public_key)
        by_id[key_id(key)] = key
    return by_id


def _loaded(path: Path, half: str, kind: Any, load: Callable[[bytes], object]) -> Any:
    """A key of ``kind`` from its PEM file."""
    from cryptography.exceptions import UnsupportedAlgorithm

    what = f"key `{path.name}`"
    try:
        key = load(read_bytes(path.parent, path.name, LARGEST_KEY, links=True))
    except OSError as error:
        raise TrustError(
            f"{what}: expected a readable file, found {error.strerror}, in {path.parent}", "make it readable"
        ) from error
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a password
        key = None
    if not isinstance(key, kind):
        raise TrustError(
            f"{what}: expected a {half} Ed25519 key in a PEM file without a password, found something else, "
            f"in {path.parent}",
            "make a pair with: ling3export keygen KEY",
        )
    return key
