"""Catalogues behind a network: a real registry and a web server, both on loopback."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import requests
from click.testing import CliRunner
from s3fs import S3FileSystem

from ling3export.artifacts.catalog import credentials, oci, remote
from ling3export.artifacts.catalog import pull as pulling
from ling3export.artifacts.catalog import registry as registries
from ling3export.artifacts.catalog.layout import OciLayout, named
from ling3export.artifacts.catalog.publish import Words, publish
from ling3export.artifacts.catalog.registry import TOKEN, Registry
from ling3export.artifacts.catalog.remote import RemoteLayout
from ling3export.artifacts.catalog.stores import choose, open_store, parse_reference, resolve
from ling3export.artifacts.manifest import MANIFEST
from ling3export.artifacts.share import check_share
from ling3export.cli import main as cli
from ling3export.foundation.errors import AuthDenied, AuthRequired, CatalogError, VersionExists
from ling3export.runners.cli import main as runner_cli
from ling3export.runners.engine.engine import Engine
from tests.support import toy_artifact
from tests.support.catalog_kills import contents
from tests.support.manifests import noted, parted
from tests.support.refusals import refusal, said
from tests.support.registries import HTPASSWD, docker_registry, web_server
from tests.support.s3_server import s3_bucket
from tests.support.token_server import USER, Answer, TokenServer, answering


@pytest.fixture(scope="module")
def registry(tmp_path_factory) -> Iterator[str]:
    """``HOST:PORT`` of a registry that takes anybody."""
    with docker_registry(tmp_path_factory.mktemp("registry")) as host:
        yield host


def pulled(store, id: str, to: Path) -> pulling.Moved:
    found = resolve(store, id, None)
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
    assert "expected oci:FOLDER, found another" in refusal(cli.main, "catalog", "gc", where)


def test_a_registry_has_weights_once_and_no_version_changes(toy, registry, tmp_path):
    store = Registry(registry)
    first = publish(toy, store, "twice", "1.0.0", Words())
    noted(toy, "other programs")
    assert publish(toy, store, "twice", "1.1.0", Words()).moved == (toy / MANIFEST).stat().st_size < first.moved
    with pytest.raises(VersionExists):
        publish(toy, store, "twice", "1.0.0", Words())
    assert [entry.version for entry in store.entries("twice")] == ["1.0.0", "1.1.0"]
    assert resolve(store, "twice", None).entry.version == "1.1.0"
    with pytest.raises(CatalogError, match="expected it in the store, found none"):
        resolve(store, "nothing", None)


def test_a_pull_goes_on_by_range(toy, registry, tmp_path, monkeypatch):
    store = Registry(registry)
    publish(toy, store, "ranges", "1.0.0", Words())
    found = resolve(store, "ranges", None)
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
    (tmp_path / "token").write_text("from-a-file\n")
    monkeypatch.setenv(TOKEN, str(tmp_path / "token"))
    with pytest.raises(AuthDenied, match="expected that its owner alone can read it"):
        Registry(host)
    (tmp_path / "token").chmod(0o600)
    store = Registry(host)
    first = requests.Request("GET", f"http://{host}/v2/", auth=store.credentials).prepare()
    assert first.headers["Authorization"] == "Bearer from-a-file"
    elsewhere = first.copy()
    elsewhere.url = "http://example.org/blob"
    answer = requests.Response()
    answer.request = first
    store.session.rebuild_auth(elsewhere, answer)
    assert "Authorization" not in elsewhere.headers


def test_a_layout_on_a_web_server_is_searched_verified_and_pulled(toy, tmp_path):
    publish(toy, OciLayout(tmp_path / "store"), "toy", "1.0.0", Words())
    with web_server(tmp_path / "store") as url:
        lines = said(cli.main, "catalog", "search", url).splitlines()
        assert len(lines) == 2 and "toy@1.0.0" in lines[1]
        said(cli.main, "catalog", "verify", f"{url}/toy")
        store = open_store(parse_reference(f"{url}/toy@1.0.0").store)
        found = resolve(store, "toy", None)
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
        RemoteLayout(url).entries()


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


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_bucket() as url:
        yield url


def test_a_layout_in_an_s3_store_is_found_verified_pulled_and_shared(toy, bucket, tmp_path):
    parted(toy)
    publish(toy, OciLayout(tmp_path / "store"), "toy", "1.0.0", Words())
    S3FileSystem().put(f"{tmp_path}/store/", f"{bucket}/", recursive=True)
    assert json.loads(said(cli.main, "catalog", "search", bucket, "toy", "--json"))[0]["version"] == "1.0.0"
    assert "bytes agree" in said(cli.main, "catalog", "verify", f"{bucket}/toy")
    said(runner_cli.main, "pull", f"{bucket}/toy", "--to", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(toy)
    said(runner_cli.main, "pull", f"{bucket}/toy", "--to", tmp_path / "share", "--target", "cpu-tp2", "--host-id", 1)
    check_share(tmp_path / "share", "cpu-tp2", 1)
    for words in (("gc", bucket), ("publish", toy, bucket, "--id", "toy", "--version", "2.0.0", "--no-run")):
        assert "expected oci:FOLDER" in refusal(cli.main, "catalog", *words)


def test_a_range_of_an_s3_object_is_what_is_asked_for_and_no_more(bucket, monkeypatch):
    """File objects of s3fs read 50 MB ahead, which of a host's share would be nearly all."""
    monkeypatch.setattr(remote, "RANGE", 100)
    store, data, asked = RemoteLayout(bucket), bytes(range(250)), []
    real = store.files.cat_file
    blob = oci.Descriptor(mediaType=oci.LAYER, digest=f"sha256:{sha256(data).hexdigest()}", size=len(data))
    none = oci.Descriptor(mediaType=oci.LAYER, digest=f"sha256:{sha256(b'').hexdigest()}", size=0)
    for each, content in ((blob, data), (none, b"")):
        S3FileSystem().pipe_file(f"{bucket}/{named(each.digest)}", content)

    def cat_file(path, start=0, end=0):
        asked.append(end - start)
        return real(path, start=start or None, end=end or None)

    monkeypatch.setattr(store.files, "cat_file", cat_file)
    for start, stop in ((0, 250), (0, None), (40, 60), (249, None)):
        assert b"".join(store.stream(blob, start, stop)) == data[start:stop]
    assert asked == [100, 150, 100, 151, 20, 2]
    assert b"".join(store.stream(none)) == b""


# What a registry may answer to a question for tags, and what is said of it.
PAGES = {
    "another host": (lambda number, other: f"http://{other}/v2/toy/tags/list?n=2", "found one of another host"),
    "itself": (lambda number, other: "/v2/toy/tags/list", "found one that names itself or an earlier one"),
    "no end": (lambda number, other: f"/v2/toy/tags/list?last={number}", "found more than 7"),
}


@pytest.mark.parametrize("case", PAGES)
def test_pages_of_tags_without_an_end_or_on_another_host_are_refused(case, monkeypatch):
    """The token went to the host that a ``Link:`` named; a page that named itself was asked for 2,028 times."""
    following, message = PAGES[case]
    monkeypatch.setattr(registries, "PAGES", 7)
    monkeypatch.setenv(TOKEN, "s3cret-token")
    asked, strangers = list[str](), list[str]()

    def elsewhere(path: str, headers: dict[str, str]) -> Answer:
        strangers.append(path)
        return 200, {}, b"{}"

    with answering(elsewhere) as other:

        def page(path: str, headers: dict[str, str]) -> Answer:
            asked.append(path)
            return 200, {"Link": f'<{following(len(asked), other)}>; rel="next"'}, b'{"tags": ["1.0.0"]}'

        with answering(page) as host, pytest.raises(CatalogError, match=message):
            Registry(host).versions("toy")
    assert len(asked) <= 7 and not strangers


@pytest.mark.parametrize("listed", [True, False])
def test_a_search_at_a_wrong_path_says_that_nothing_is_there(listed):
    """It printed nothing at all, also where a host was no registry or one that lists no names."""
    answer = (200, {}, b'{"repositories": ["team/toy"]}') if listed else (404, {}, b"")
    with answering(lambda path, headers: answer) as host:
        if listed:
            done = CliRunner().invoke(cli.main, ["catalog", "search", f"{host}/taem"])
            assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"{host}/taem: no such version\n")
            assert json.loads(said(cli.main, "catalog", "search", f"{host}/taem", "--json")) == []
        else:
            text = refusal(cli.main, "catalog", "search", host)
            assert text == f"error: store `{host}`: expected to GET /v2/_catalog, found 404\n"


def test_all_pages_of_tags_together_are_no_larger_than_a_document():
    """1,000 pages of 8 MB each once took 6 GB."""
    big, asked = json.dumps({"tags": ["x" * 1_000_000]}).encode(), list[str]()

    def page(path: str, headers: dict[str, str]) -> Answer:
        asked.append(path)
        return 200, {"Link": f'</v2/toy/tags/list?last={len(asked)}>; rel="next"'}, big

    with answering(page) as host, pytest.raises(CatalogError, match="expected a document of at most"):
        Registry(host).versions("toy")
    assert len(asked) == 9


def test_a_version_costs_one_request_and_the_latest_two_however_many_there_are():
    """Each tag was once asked for: 3,000 of them took over a minute."""
    tags, asked = json.dumps({"tags": [f"1.{number}.0" for number in range(3000)]}).encode(), list[str]()

    def page(path: str, headers: dict[str, str]) -> Answer:
        asked.append(path)
        return 200, {}, tags if path.endswith("list") else b"{}"

    with answering(page) as host:
        assert str(choose(Registry(host), "toy", "1.7.0")) == "toy@1.7.0" and asked == ["/v2/toy/manifests/1.7.0"]
        asked.clear()
        assert str(choose(Registry(host), "toy", None)) == "toy@1.2999.0"
    assert asked == ["/v2/toy/tags/list", "/v2/toy/manifests/1.2999.0"]


def test_a_document_that_drips_has_a_deadline(monkeypatch):
    monkeypatch.setattr(credentials, "DEADLINE", 0.3)
    stopped = threading.Event()

    def drips() -> Iterator[bytes]:
        while not stopped.wait(0.05):
            yield b" "

    began = time.monotonic()
    with answering(lambda path, headers: (200, {"Content-Length": "1000000"}, drips())) as host:
        with pytest.raises(CatalogError, match=r"expected a document within 0\.3 s, found a part"):
            Registry(host).versions("toy")
        stopped.set()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("token", ["s3cret\nHost: x", "s3cret-\u00e9", "s3 cret", "/no/s3cret/file"])
@pytest.mark.parametrize("in_file", [False, True])
def test_a_token_that_cannot_be_sent_is_refused_and_not_printed(token, in_file, tmp_path, monkeypatch):
    """Its traceback once printed it."""
    if in_file:
        (tmp_path / "token").write_text(token if token[0] != "/" else "s3cret\x7f")
        (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv(TOKEN, str(tmp_path / "token") if in_file else token)
    text = refusal(cli.main, "catalog", "search", "127.0.0.1:9", code=14)
    assert text.startswith(f"error: {TOKEN}: expected a token") and "cret" not in text
