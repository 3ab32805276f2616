"""The page at ``/``: a conversation in a browser, in one file that refers to nothing else."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE = "/"


def page_routes() -> list[Route]:
    """Where the page is."""
    response = page()

    async def endpoint(request: Request) -> Response:
        return response

    return [Route(PAGE, endpoint, methods=["GET"])]


def page() -> Response:
    """The page. The browser runs its own script and style alone, and lets them reach this server alone (CSP 3)."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    own = {kind: _digest(text, kind) for kind in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {own['script']}; style-src {own['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(text, media_type="text/html", headers=headers)


def _digest(text: str, kind: str) -> str:
    (inner,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()}'"
