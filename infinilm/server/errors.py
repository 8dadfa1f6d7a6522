"""Errors as answers: each becomes one of HTTP, which APIs tell in their own words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from infinilm.engine.request import Aborted, EngineDead, NumericalError, QueueFull, RequestError
from infinilm.server.admission import Overloaded
from infinilm.server.service import UnknownModel
from infinilm.tokenizer import TokenizerError


class HttpError(Exception):
    """An answer other than 200, as any API may tell it."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = dict(headers or {})


ErrorBody = Callable[[HttpError], dict[str, Any]]


def http_error(error: BaseException) -> HttpError:
    """Any error as an answer. What is our own fault is told to the log alone."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, EngineDead):
        return engine_dead()
    status, kind = status_of(error)
    is_known = status < 500 or isinstance(error, NumericalError | Aborted)
    message = (str(error) or type(error).__name__) if is_known else "the server failed; its log says why"
    param, code = getattr(error, "field", None), getattr(error, "code", None)
    seconds = error.seconds if isinstance(error, Overloaded) else 1
    headers = {"retry-after": str(seconds)} if isinstance(error, QueueFull) else {}
    return HttpError(status, message, kind, param=param, code=code, headers=headers)


def status_of(error: BaseException) -> tuple[int, str]:
    if isinstance(error, UnknownModel):
        return 404, "invalid_request_error"
    if isinstance(error, RequestError | TokenizerError):
        return 400, "invalid_request_error"
    if isinstance(error, QueueFull):
        return 429, "rate_limit_error"
    return 500, "server_error"


def engine_dead() -> HttpError:
    return HttpError(503, "the engine has stopped", "server_error", code="engine_dead")


def openai_error(error: HttpError) -> dict[str, Any]:
    told = {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}
    return {"error": told}
