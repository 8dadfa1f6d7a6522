"""The ASGI application: routes, and what stands before them: request ids, the key, the access log."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infinilm.server import anthropic, openai, pooling, responses
from infinilm.server.bodies import Body
from infinilm.server.endpoint import Endpoint, Sender, refuse
from infinilm.server.errors import HttpError, openai_error
from infinilm.server.exchange import Call, Operation, Raw, Reply, Server
from infinilm.server.metrics import metrics
from infinilm.server.pages import HEADERS, page_files
from infinilm.server.stored import Owner

ACCESS = logging.getLogger("infinilm.access")
MAX_LOGGED_PATH = 200  # characters
MAX_HEADERS = 256  # of a request
METHODS = ("GET", "POST", "DELETE")
REQUEST_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)
PAGE = page_files()
# Paths that need no key; all others do, those that do not exist among them.
PUBLIC = {"/health", *PAGE}


# ---- routes that are no API's ------------------------------------------------------------------------------


async def health(call: Call) -> Reply:
    """Whether requests would be answered: not while the model is loaded, nor if the engine does not react"""
    if not await call.service.is_alive():
        raise HttpError(503, "the engine does not react", "unavailable_error", code="engine_dead")
    return {"status": "ok"}


async def show_version(call: Call) -> Reply:
    """The version of the server"""
    return {"version": version("infinilm")}


async def hello(call: Call) -> Reply:
    """Nothing: clients try out the connection by it."""
    return Raw(b"", "text/plain")


async def openapi(call: Call) -> Reply:
    """This document"""
    return DOCUMENT


async def page(call: Call) -> Reply:
    """A file of the chat page"""
    content, content_type = PAGE[call.scope["path"]]
    return Raw(content, content_type, headers=HEADERS)


OPERATIONS: tuple[Operation, ...] = (
    *openai.OPERATIONS,
    *responses.OPERATIONS,
    *anthropic.OPERATIONS,
    *pooling.OPERATIONS,
    Operation("GET", "/health", health),
    Operation("GET", "/metrics", metrics),
    Operation("GET", "/version", show_version),
    Operation("GET", "/api/hello", hello),
    Operation("GET", "/openapi.json", openapi),
)


def make_app(server: Server) -> ASGIApp:
    routes = [
        Route(operation.path, Endpoint(server, operation), methods=[operation.method])
        for operation in (*OPERATIONS, *(Operation("GET", path, page) for path in PAGE))
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: not_routed})
    app.router.redirect_slashes = False
    return for_pages(Front(app, server), server.settings.origins)


def for_pages(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Browsers let pages of these origins read answers. What they ask beforehand needs no key."""
    if not origins:
        return app
    told = ("x-request-id", "request-id", "retry-after")
    return CORSMiddleware(app, origins, allow_methods=METHODS, allow_headers=["*"], expose_headers=told)


async def not_routed(request: Request, error: Exception) -> Response:
    """No such path, or not by this method"""
    status = error.status_code if isinstance(error, HTTPException) else 404
    headers = {"allow": ", ".join(methods_of(request))} if status == 405 else None
    path = request.scope["path"][:MAX_LOGGED_PATH]
    told = f"there is no {path!r}" if status == 404 else f"{path!r} does not take {request.method[:16]}"
    code = "not_found" if status == 404 else "method_not_allowed"
    return JSONResponse(error_body_of(path)(HttpError(status, told, code=code)), status, headers)


def methods_of(request: Request) -> list[str]:
    """Those that a path takes, of all its routes: starlette tells those of the first alone."""
    routes = [one for one in request.app.routes if one.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for one in routes for method in one.methods})


def error_body_of(path: str) -> Any:
    """How the API that a path belongs to tells of errors"""
    found = [one.error_body for one in OPERATIONS if f"{path}/".startswith(f"{one.path}/")]
    return found[0] if found else openai_error


# ---- what stands before them -------------------------------------------------------------------------------


class Front:
    """Gives each request an id, asks for the key, and writes a line when it has been answered."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app = app
        self.server = server
        self.keys = [digest(key.encode()) for key in server.settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        scope["infinilm.request_id"] = request_id = id_of(headers)
        start, status, told = time.monotonic(), 0, request_id.encode()
        named = (b"x-request-id", told), (b"request-id", told)  # as OpenAI's clients read it, and Anthropic's

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self.count(scope, status)
                message = {**message, "headers": [*message["headers"], *named]}
            await send(message)

        try:
            if (error := self.refusal(scope, headers)) is not None:
                await refuse(error, error_body_of(scope["path"]), Sender(send_on), receive)
            else:
                await self.app(scope, receive, send_on)
        finally:
            if status == 0:
                self.count(scope, status)
            log(scope, request_id, status, time.monotonic() - start)

    def count(self, scope: Scope, status: int) -> None:
        """Called as soon as there is a status, so that a caller who has it finds it counted."""
        self.server.statuses[(*routed(scope), status)] += 1

    def refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> HttpError | None:
        if (refusal := self.server.reason_to_refuse) is not None:
            return refusal
        if len(scope["headers"]) > MAX_HEADERS:
            return HttpError(431, f"a request must have at most {MAX_HEADERS} headers, but has more")
        # By the path that was routed: a URL could be another by the Host that a caller names.
        scope["infinilm.owner"] = owner = self.owner(headers)
        if not self.keys or scope["path"] in PUBLIC or owner is not None:
            return None
        told = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        return HttpError(401, told, "authentication_error", code="invalid_api_key", headers=CHALLENGE)

    def owner(self, headers: dict[bytes, bytes]) -> Owner:
        """The digest of the key, if it is known; in the same time whatever it is"""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = [headers.get(b"x-api-key", b""), token.strip() if scheme.lower() == b"bearer" else b""]
        known = [key for one in given for key in self.keys if hmac.compare_digest(digest(one), key)]
        return known[0] if known else None


def routed(scope: Scope) -> tuple[str, str]:
    """The method and the path as routes name them; what callers make up would have no end."""
    operation = getattr(scope.get("endpoint"), "operation", None)
    method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "DELETE") else "other"
    return method, operation.path if operation is not None else "other"


CHALLENGE = {"www-authenticate": "Bearer"}


def digest(key: bytes) -> bytes:
    """A digest, which has one length for all keys"""
    return hashlib.sha256(key).digest()


def id_of(headers: dict[bytes, bytes]) -> str:
    """The caller's own, if it is a plain one"""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


def log(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    """A line of JSON. Status 0: the caller left before there was one."""
    if scope["path"] == "/api/hello" or not ACCESS.isEnabledFor(logging.INFO):
        return
    told = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "request_id": request_id,
        "client": (scope.get("client") or [""])[0],
        "method": scope["method"][:16],
        "path": scope["path"][:MAX_LOGGED_PATH],
        "status": status,
        "ms": round(seconds * 1e3, 1),
    }
    ACCESS.info("%s", json.dumps(told))


# ---- /openapi.json -----------------------------------------------------------------------------------------


def document() -> dict[str, Any]:
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        path = operation.path.replace(":path}", "}")
        paths.setdefault(path, {})[operation.method.lower()] = described(operation, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "infinilm", "version": version("infinilm")},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }


def described(operation: Operation, path: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"application/json": {}}
    if operation.can_stream:
        answer["text/event-stream"] = {}
    told: dict[str, Any] = {
        "summary": (operation.handler.__doc__ or "").splitlines()[0],
        "responses": {"200": {"description": "the answer", "content": answer}, "default": ERROR},
    }
    if parameters := [*path_parameters(path), *query_parameters(operation.query)]:
        told["parameters"] = parameters
    if operation.body is not None:
        schema = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return told


def path_parameters(path: str) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)}", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def query_parameters(query: type[Body] | None) -> list[dict[str, Any]]:
    """The fields of a query that are its own"""
    schemas = {} if query is None else query.model_json_schema()["properties"]
    return [
        {"name": name, "in": "query", "schema": schema}
        for name, schema in schemas.items()
        if name not in Body.model_fields
    ]


ERROR = {"description": "an error", "content": {"application/json": {}}}
DOCUMENT = document()
