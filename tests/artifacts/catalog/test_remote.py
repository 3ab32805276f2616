"""Catalogues behind a network: a real registry and a web server, both on loopback."""

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import requests
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from ling3export.artifacts.catalog import oci, remote
from ling3export.artifacts.catalog import pull as pulling
from ling3export.artifacts.catalog.layout import INDEX, Layout
from ling3export.artifacts.catalog.publish import Words, attach, attached, publish
from ling3export.artifacts.catalog.record import Score
from ling3export.artifacts.catalog.registry import TOKEN, Registry
from ling3export.artifacts.catalog.remote import Remote
from ling3export.artifacts.catalog.stores import open_store, parse_reference
from ling3export.artifacts.manifest import MANIFEST, read_manifest, write_manifest
from ling3export.cli import main as cli
from ling3export.foundation.errors import AuthDenied, AuthRequired, CatalogError, VersionExists
from ling3export.runners.cli import main as runner_cli
from ling3export.runners.engine.engine import Engine
from tests.support import toy_artifact
from tests.support.refusals import refusal
from tests.support.registries import HTPASSWD, docker_registry, web_server
from tests.support.token_server import USER, Answer, TokenServer, answering


@pytest.fixture(scope="module")
def registry(tmp_path_factory) -> Iterator[str]:
    """``HOST:PORT`` of a registry that takes anybody."""
    with docker_registry(tmp_path_factory.mktemp("registry")) as host:
        yield host


@pytest.fixture
def toy(tmp_path) -> Path:
    return Path(shutil.copytree(toy_artifact.shared(), tmp_path / "x.ling3"))


def said(main, *words: object) -> str:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def pulled(store, id: str, to: Path) -> pulling.Moved:
    *_, found = pulling.resolve(store, id, None)
    return pulling.pull(store, found, to, to.with_name("blobs"))


def test_published_into_a_registry_found_pulled_and_run(toy, registry, tmp_path):
    where = f"{registry}/team"
    published = ("catalog", "publish", toy, where, "--id", "toy", "--version", "1.0.0+b.1", "--no-run")
    digest = said(cli.main, *published)
    assert said(cli.main, *published) == digest
    assert json.loads(said(cli.main, "catalog", "search", where, "toy", "--json"))[0]["version"] == "1.0.0+b.1"
    assert json.loads(said(cli.main, "catalog", "info", f"{where}/toy:1.0.0+b.1"))["digest"] == digest.strip()
    assert "bytes agree" in said(cli.main, "catalog", "verify", f"{where}/toy")
    said(runner_cli.main, "pull", f"{where}/toy", "--to", tmp_path / "out.ling3")
    assert contents(tmp_path / "out.ling3") == contents(toy)
    with Engine(tmp_path / "out.ling3", report=lambda text: None) as engine:
        toy_artifact.check_tokens(engine)
    image = requests.get(
        f"http://{registry}/v2/team/toy/manifests/latest", headers={"Accept": oci.MANIFEST}, timeout=60
    ).json()
    assert image["artifactType"] == oci.ARTIFACT and image["config"]["mediaType"] == oci.RECORD
    assert {each["annotations"][oci.TITLE] for each in image["layers"]} == set(contents(toy))
    assert "expected oci:FOLDER, found a registry" in refusal(cli.main, "catalog", "gc", where)


def test_a_registry_has_weights_once_and_no_version_changes(toy, registry, tmp_path):
    store = Registry(registry)
    first = publish(toy, store, "twice", "1.0.0", Words())
    write_manifest(toy, replace(read_manifest(toy), notes=("other programs",)))
    assert publish(toy, store, "twice", "1.1.0", Words()).moved == (toy / MANIFEST).stat().st_size < first.moved
    with pytest.raises(VersionExists):
        publish(toy, store, "twice", "1.0.0", Words())
    assert [entry.version for entry in store.entries("twice")] == ["1.0.0", "1.1.0"]
    assert pulling.resolve(store, "twice", None)[0].entry.version == "1.1.0"
    with pytest.raises(CatalogError, match="expected it in the store, found none"):
        pulling.resolve(store, "nothing", None)


def test_a_pull_goes_on_by_range(toy, registry, tmp_path, monkeypatch):
    store = Registry(registry)
    publish(toy, store, "ranges", "1.0.0", Words())
    (found,) = pulling.resolve(store, "ranges", None)
    file = next(each for each in found.record.files if each.path == "weights/toy.safetensors")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / f"{file.sha256}.partial").write_bytes((toy / file.path).read_bytes()[:100_000])
    moved = pulling.pull(store, found, tmp_path / "out", tmp_path / "blobs")
    assert (moved.pulled, moved.here) == (found.record.size - 100_000, 100_000)
    assert contents(tmp_path / "out") == contents(toy)


def test_a_registry_that_asks_gets_a_token_and_no_other_host_does(toy, tmp_path, monkeypatch):
    (tmp_path / "users").write_text(HTPASSWD)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    auth = f"auth: {{htpasswd: {{realm: x, path: {tmp_path}/users}}}}\n"
    with docker_registry(tmp_path, auth) as host:
        with pytest.raises(AuthRequired):
            Registry(host).entries("toy")
        assert refusal(cli.main, "catalog", "search", host, code=13).startswith(
            f"error: store `{host}`: expected a token, found none\nhint: put it into {TOKEN}"
        )
        known = base64.b64encode(b"me:secret").decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": known}}}))
        publish(toy, Registry(host), "toy", "1.0.0", Words())
        pulled(Registry(host), "toy", tmp_path / "out")
        assert contents(tmp_path / "out") == contents(toy)
        monkeypatch.setenv(TOKEN, "s3cret-token")
        with pytest.raises(AuthDenied) as caught:
            Registry(host).entries("toy")
        assert "s3cret-token" not in str(caught.value)
        assert refusal(cli.main, "catalog", "search", host, code=14).startswith("error: store ")
    (tmp_path / "token").write_text("from a file\n")
    monkeypatch.setenv(TOKEN, str(tmp_path / "token"))
    with pytest.raises(AuthDenied, match="expected that its owner alone can read it"):
        Registry(host)
    (tmp_path / "token").chmod(0o600)
    store = Registry(host)
    first = requests.Request("GET", f"http://{host}/v2/", auth=store._credentials).prepare()
    assert first.headers["Authorization"] == "Bearer from a file"
    elsewhere = first.copy()
    elsewhere.url = "http://example.org/blob"
    answer = requests.Response()
    answer.request = first
    store._session.rebuild_auth(elsewhere, answer)
    assert "Authorization" not in elsewhere.headers


def test_a_layout_on_a_web_server_is_searched_verified_and_pulled(toy, tmp_path):
    publish(toy, Layout(tmp_path / "store"), "toy", "1.0.0", Words())
    with web_server(tmp_path / "store") as url:
        lines = said(cli.main, "catalog", "search", url).splitlines()
        assert len(lines) == 2 and "toy@1.0.0" in lines[1]
        said(cli.main, "catalog", "verify", f"{url}/toy")
        store = open_store(parse_reference(f"{url}/toy@1.0.0").store)
        (found,) = pulling.resolve(store, "toy", None)
        file = next(each for each in found.record.files if each.path == "weights/toy.safetensors")
        (tmp_path / "blobs").mkdir()
        (tmp_path / "blobs" / f"{file.sha256}.partial").write_bytes((toy / file.path).read_bytes()[:1000])
        pulled(store, "toy", tmp_path / "out")
        assert contents(tmp_path / "out") == contents(toy)
        assert "found one that is read alone" in refusal(
            cli.main, "catalog", "publish", toy, url, "--id", "toy", "--version", "2.0.0", "--no-run"
        )
        (tmp_path / "store/index.json").unlink()
        with pytest.raises(CatalogError, match="expected an OCI image layout, found No such file"):
            store.entries()
    with pytest.raises(CatalogError, match="expected an OCI image layout, found"):
        Remote(url).entries()


def test_a_registry_that_names_a_token_server_gets_tokens_for_the_password_of_docker(toy, tmp_path, monkeypatch):
    """A real registry: it checks the tokens' signature, audience and scopes."""
    tokens = TokenServer(tmp_path)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with answering(tokens.answer) as realm:
        auth = (
            f"auth: {{token: {{realm: 'http://{realm}/token', service: catalogue, issuer: tokens, "
            f"rootcertbundle: {tokens.bundle}}}}}\n"
        )
        with docker_registry(tmp_path, auth) as host:
            with pytest.raises(AuthRequired, match=f"expected a token from {realm}, found 401"):
                Registry(host).entries("toy")
            (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": USER.partition(" ")[2]}}}))
            publish(toy, Registry(host), "toy", "1.0.0", Words())
            pulled(Registry(host), "toy", tmp_path / "out")
            assert contents(tmp_path / "out") == contents(toy)
            asked = [scope.rpartition(":") for scope, given in tokens.asked if given]  # the registry takes any order
            assert {(what, *sorted(actions.split(","))) for what, _, actions in asked} == {
                ("repository:toy", "pull"),
                ("repository:toy", "pull", "push"),
            }
            wrong = base64.b64encode(b"me:wrong").decode()
            (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": wrong}}}))
            with pytest.raises(AuthDenied) as caught:
                Registry(host).entries("toy")
            assert wrong not in str(caught.value) and "wrong" not in str(caught.value)
            monkeypatch.setenv(TOKEN, "refused")  # the user's own token is not exchanged for another
            with pytest.raises(AuthDenied, match="expected a token that may do this, found one that may not"):
                Registry(host).entries("toy")


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((200, {}, b"{}"), "expected a token from .*, found 200"),
        ((200, {}, b'{"token": "a\\nHost: x"}'), "expected a token from .*, found 200"),
        ((200, {}, b" " * ((8 << 20) + 1)), "expected a document of at most"),
        ((500, {}, b"{}"), "expected a token from .*, found 500"),
    ],
)
def test_a_token_server_that_answers_otherwise_is_refused(reply, message):
    with answering(lambda path, headers: reply) as realm:
        challenge = {"WWW-Authenticate": f'Bearer realm="http://{realm}/",service="x"'}
        with answering(lambda path, headers: (401, challenge, b"")) as host, pytest.raises(CatalogError, match=message):
            Registry(host).entries("toy")


def test_a_password_is_not_sent_to_a_token_server_on_another_host(tmp_path, monkeypatch):
    seen: list[str | None] = []

    def asked(path: str, headers: dict[str, str]) -> Answer:
        seen.append(headers.get("authorization"))
        return 401, {}, b"{}"

    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with answering(asked) as realm:
        elsewhere = realm.replace("127.0.0.1", "localhost")
        challenge = {"WWW-Authenticate": f'Bearer realm="http://{elsewhere}/",service="x"'}
        with answering(lambda path, headers: (401, challenge, b"")) as host:
            (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": USER.partition(" ")[2]}}}))
            with pytest.raises(AuthDenied, match=f"found 401, where a password for {host} is not sent"):
                Registry(host).entries("toy")
    assert seen == [None]


def test_a_registry_that_redirects_takes_no_token_with_it_and_no_endless_answer(monkeypatch):
    monkeypatch.setenv(TOKEN, "s3cret-token")
    seen: list[str | None] = []

    def elsewhere(path: str, headers: dict[str, str]) -> Answer:
        seen.append(headers.get("authorization"))
        return 200, {}, b" " * ((8 << 20) + 1)

    with answering(elsewhere) as other:
        away = {"Location": f"http://{other}/x"}
        with answering(lambda path, headers: (307, away, b"")) as host:
            store = Registry(host)
            with pytest.raises(CatalogError, match="expected a document of at most 8,388,608 bytes, found more"):
                store.entries("toy")
        loop = {"Location": "/v2/again"}
        with (
            answering(lambda path, headers: (307, loop, b"")) as host,
            pytest.raises(CatalogError, match="expected an answer, found TooManyRedirects"),
        ):
            Registry(host).entries("toy")
        with (
            answering(lambda path, headers: (307, {"Location": "file:///etc/passwd"}, b"")) as host,
            pytest.raises(CatalogError, match="expected an answer, found InvalidSchema"),
        ):
            Registry(host).entries("toy")
    assert seen and set(seen) == {None}


def test_a_layout_that_fsspec_writes_is_published_into_and_pulled_from(toy, tmp_path):
    where = "memory://bucket/catalogue"
    try:
        words = ("catalog", "publish", toy, where, "--id", "toy", "--no-run", "--version")
        digest = said(cli.main, *words, "1.0.0")
        assert said(cli.main, *words, "1.0.0") == digest
        first = Remote(where).entries()
        write_manifest(toy, replace(read_manifest(toy), notes=("other programs",)))
        with pytest.raises(VersionExists):
            publish(toy, Remote(where), "toy", "1.0.0", Words())
        assert publish(toy, Remote(where), "toy", "1.1.0", Words()).moved == (toy / MANIFEST).stat().st_size
        assert Remote(where).entries()[:1] == first
        assert json.loads(said(cli.main, "catalog", "search", where, "toy", "--json"))[0]["version"] == "1.1.0"
        said(runner_cli.main, "pull", f"{where}/toy", "--to", tmp_path / "out.ling3")
        assert contents(tmp_path / "out.ling3") == contents(toy)
        said(cli.main, "catalog", "yank", f"{where}/toy@1.1.0")
        assert pulling.resolve(Remote(where), "toy", None)[0].entry.version == "1.0.0"
        assert "where nobody knows who else is publishing" in refusal(cli.main, "catalog", "gc", where)
    finally:
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_a_publication_through_fsspec_that_breaks_leaves_no_part_and_waits_for_the_index(toy, monkeypatch):
    store = Remote("memory://broken")
    try:
        breaking = iter([None, None, KeyboardInterrupt])

        def written(self, path, size, real=Remote._written):
            if (error := next(breaking, None)) is not None:
                raise error
            return real(self, path, size)

        with monkeypatch.context() as patch:
            patch.setattr(Remote, "_written", written)
            with pytest.raises(KeyboardInterrupt):
                publish(toy, store, "toy", "1.0.0", Words())
        assert store.entries() == []
        with suppress(ZeroDivisionError), store._written("blobs/sha256/y", 1) as file:
            file.write(b"half")
            raise ZeroDivisionError
        assert not store._there("blobs/sha256/y")
        assert store._created(".index.lock", b"another machine, process 1")
        monkeypatch.setattr(remote, "PATIENCE", 0.0)
        with pytest.raises(CatalogError, match="found it held by another machine, process 1"):
            publish(toy, store, "toy", "1.0.0", Words())
        store._files.rm_file(store._at(".index.lock"))
        publish(toy, store, "toy", "1.0.0", Words())
        assert pulling.verify(store, pulling.resolve(store, "toy", None)[0]) > 0
        assert not store._there(".index.lock")
    finally:
        fsspec.filesystem("memory").rm("/broken", recursive=True)


class Google(MemoryFileSystem):
    """Memory with the generations of Google's objects, and the upload on a condition as gcsfs passes it on."""

    protocol, store, pseudo_dirs, base = ("gs", "gcs"), {}, [""], "http://x/storage/v1/"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("gs://").strip("/")

    def split_path(self, path: str) -> tuple[str, str, None]:
        _, bucket, name = path.split("/", 2)
        return bucket, name, None

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found = super().info(path, **options)
        modified = getattr(self.store.get(self._strip_protocol(path)), "modified", None)
        return found | {"generation": modified and str(modified.timestamp())}

    def call(self, method: str, url: str, *, uploadType: str, name: str, data: bytes, ifGenerationMatch: str) -> None:
        assert (method, url, uploadType) == ("POST", "http://x/upload/storage/v1/b/bucket/o", "media")
        path = f"/bucket/{name}"
        if ifGenerationMatch != (self.info(path)["generation"] if self.exists(path) else "0"):
            raise PreconditionFailed
        self.pipe_file(path, data)


class PreconditionFailed(FileExistsError):
    """As gcsfs says that a condition does not hold."""


def test_a_store_of_googles_writes_the_index_over_the_generation_that_was_read(toy, tmp_path, monkeypatch):
    monkeypatch.setitem(_registry, "gs", Google)
    where, call = "gs://bucket/catalogue", Google.call
    others = [lambda: publish(toy, Remote(where), "other", "1.0.0", Words())]

    def called(self, method, url, **what):
        if what["name"].endswith(INDEX) and others:
            others.pop()()
        return call(self, method, url, **what)

    monkeypatch.setattr(Google, "call", called)
    for version in ("1.0.0", "1.1.0"):
        publish(toy, Remote(where), "toy", version, Words())
        others.append(lambda version=version: publish(toy, Remote(where), "other", f"2{version}", Words()))
    found = [(entry.id, entry.version) for entry in Remote(where).entries()]
    assert found == [("other", "1.0.0"), ("other", "21.0.0"), ("toy", "1.0.0"), ("toy", "1.1.0")]
    assert not Remote(where)._there(".index.lock")
    pulled(Remote(where), "toy", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(toy)
    monkeypatch.setattr(
        Google, "call", lambda self, method, url, name, data, **_: self.pipe_file(f"/bucket/{name}", data)
    )
    with pytest.raises(CatalogError, match="found one that writes in any case"):
        Remote(where).yank("toy", "1.0.0")


def test_evaluations_are_attached_in_a_registry_under_the_tag_that_the_specification_names(toy, registry):
    store = Registry(registry)
    publish(toy, store, "scored", "1.0.0", Words())
    results = toy.parent / "run"
    results.mkdir()
    (results / "run.json").write_text("{}")
    for suite in ("one", "two", "one"):
        score = Score(suite, 0.5, "sha256:" + "0" * 64)
        attach(store, "scored", "1.0.0", score, results, ["run.json"])
    reader = Registry(registry)
    (entry,) = reader.entries("scored")
    assert [score.suite for score in attached(reader, entry)] == ["one", "two"]
    tag = entry.descriptor.digest.replace(":", "-")
    listed = requests.get(f"http://{registry}/v2/scored/manifests/{tag}", headers={"Accept": oci.INDEX}, timeout=60)
    assert {each["artifactType"] for each in listed.json()["manifests"]} == {oci.EVAL}
