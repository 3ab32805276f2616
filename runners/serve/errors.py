"""What a client is told when it gets no answer: the error object of OpenAI's API, with a status of HTTP."""

from typing import Any

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused, or that failed.

    Args:
        status: Of HTTP.
        message: What was expected and what was found.
        param: The field of the body that is wrong.
        code: A word that programs can look for.
        headers: Sent along.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The error object."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = KINDS.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def malformed(param: str, wanted: str, found: str) -> ApiError:
    """A field with a value that cannot be used."""
    return ApiError(400, f"`{param}`: expected {wanted}, found {found}", param=param, code="invalid_value")
