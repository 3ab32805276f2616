"""The page at ``/``, and calls from pages of other sites (CORS); test_browser.py has its behaviour in a browser."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from click.testing import CliRunner

from ling3export.foundation.errors import RequestError
from ling3export.runners.cli.main import main
from ling3export.runners.route.app import Router, RoutingPolicy
from ling3export.runners.route.app import application as router_application
from ling3export.runners.serve.app import Policy, application
from ling3export.runners.serve.config import ServerConfig
from ling3export.runners.serve.run import opened
from tests.support.scripted import HI, MODEL, Talk, talking
from tests.support.serving import answered

CHAT = "/v1/chat/completions"
ORIGIN, OTHER = "https://chat.example.org", "https://evil.example.org"
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
BODY = {"model": MODEL, "messages": HI, "max_tokens": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with talking(tmp_path_factory.mktemp("page")) as found:
        yield found


def served(model: Talk, method: str, path: str, *, key: str | None = None, policy: Any = None, **how: Any) -> Any:
    return answered(application(model.engine, Policy(MODEL, key, 8, 1 << 16, **(policy or {}))), method, path, **how)


class Elements(HTMLParser):
    """Every tag of a page with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_has_no_references_and_runs_only_its_own_script(model):
    found = served(model, "GET", "/", policy={"page": True})
    assert (found.status_code, found.headers["content-type"]) == (200, "text/html; charset=utf-8")
    rules = dict(each.strip().split(" ", 1) for each in found.headers["content-security-policy"].split(";"))
    assert (
        rules["default-src"] == "'none'" and rules["connect-src"] == "'self'" and rules["frame-ancestors"] == "'none'"
    )
    for kind in ("script", "style"):
        (inner,) = re.findall(rf"<{kind}>(.*?)</{kind}>", found.text, re.DOTALL)
        assert rules[f"{kind}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()}'"
    tags = Elements(found.text).tags
    references = [value for _, attributes in tags for name, value in attributes.items() if name in ("src", "href")]
    assert references == ["data:,"]
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on") or name == "style"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|https?://", found.text)


def test_the_page_needs_no_key_and_what_it_calls_does(model):
    assert served(model, "GET", "/", key="k", policy={"page": True}).status_code == 200
    assert served(model, "GET", "/v1/models", key="k", policy={"page": True}).status_code == 401
    assert (served(model, "GET", "/", key="k").status_code, served(model, "GET", "/").status_code) == (401, 404)


def test_a_server_has_a_page_and_its_options_say_who_may_call():
    for origins in ((), (ORIGIN, OTHER)):
        listener, policy = opened(ServerConfig(port=0, allow_origin=origins), MODEL, 8)
        listener.close()
        assert (policy.page, policy.origins) == (True, origins)


def test_a_router_has_the_page_too():
    router = Router([], [], RoutingPolicy())
    with_page = answered(router_application(router, Policy("", None, 1, 1000, page=True)), "GET", "/")
    assert (with_page.status_code, "<!doctype html>" in with_page.text) == (200, True)
    assert answered(router_application(router, Policy("", None, 1, 1000)), "GET", "/").status_code == 404


def test_a_page_of_an_allowed_origin_may_call(model):
    policy = {"origins": (ORIGIN,)}
    may = served(model, "OPTIONS", CHAT, key="k", policy=policy, headers={"Origin": ORIGIN, **ASKS})
    assert (may.status_code, may.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "POST" in may.headers["access-control-allow-methods"]
    assert may.headers["access-control-allow-headers"] == ASKS["Access-Control-Request-Headers"]
    model.lines.texts = ["a"]
    headers = {"Origin": ORIGIN, "Authorization": "Bearer k"}
    found = served(model, "POST", CHAT, key="k", policy=policy, headers=headers, json=BODY)
    assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, ORIGIN)
    refused = served(model, "POST", CHAT, key="k", policy=policy, headers={"Origin": ORIGIN}, json=BODY)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)


def test_a_page_of_another_origin_may_not_call(model):
    for policy in ({"origins": (ORIGIN,)}, {}):
        may = served(model, "OPTIONS", CHAT, policy=policy, headers={"Origin": OTHER, **ASKS})
        assert may.status_code == (400 if policy else 405)
        assert "access-control-allow-origin" not in may.headers


def test_a_cors_preflight_is_granted_only_under_names_of_this_server(model):
    """A preflight is not granted if the call itself would get 421."""
    policy = {"origins": (ORIGIN,), "hosts": frozenset({"localhost"})}
    headers = {"Origin": ORIGIN, "Host": "rebound.example.org", **ASKS}
    may = served(model, "OPTIONS", CHAT, policy=policy, headers=headers)
    assert (may.status_code, "access-control-allow-origin" in may.headers) == (421, False)


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://a b", ""])
def test_an_invalid_origin_is_refused(origin):
    with pytest.raises(RequestError, match=r"allow_origin: expected .* such as https://example.org"):
        ServerConfig(allow_origin=(origin,))
    told = CliRunner().invoke(main, ["serve", "none", "--allow-origin", origin])
    assert told.exit_code != 0
