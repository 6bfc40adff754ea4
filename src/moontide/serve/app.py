"""The application: the guarded routes, the pages, and error responses.

An error is a JSON object with one sentence, `detail`. Statuses: 400 malformed, 401 and 403 not authorised, 404 not
found, 408 too slow, 409 conflict, 413 too large, 415 wrong content type, 422 invalid values, 429 too busy, 503
unavailable (the last two with Retry-After).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response

import moontide
from moontide.errors import FileError, MoontideError, ResourceError
from moontide.serve import auth
from moontide.serve.auth import Guard
from moontide.serve.batching import BusyError
from moontide.serve.images import KindError, TooLargeError
from moontide.serve.models import in_words
from moontide.serve.parsing import JSONError
from moontide.serve.pushes import PushRoute
from moontide.serve.routes import router
from moontide.serve.service import Service
from moontide.serve.state import EmptyError, GoneError, TakenError
from moontide.serve.stream_store import StoreError

STATUS: dict[type[BaseException], int] = {
    JSONError: 400,
    GoneError: 404,
    TakenError: 409,
    EmptyError: 409,
    ResourceError: 413,
    TooLargeError: 413,
    KindError: 415,
    BusyError: 429,
    StoreError: 503,
    FileError: 503,
    MoontideError: 422,
}
PAGES = {"/": "index.html", "/docs": "docs.html"} | {path: path[1:] for path in sorted(auth.PAGES) if "." in path}
KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


def create_app(service: Service) -> FastAPI:
    """Create the application of a service; it opens the service at startup and closes it at shutdown."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.open()
        yield
        await service.close()

    app = FastAPI(
        title="Moontide", version=moontide.__version__, summary="Zero-shot labels that adapt as samples arrive.",
        docs_url=None, redoc_url=None, lifespan=lifespan,
    )  # fmt: skip
    app.state.service = service
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    app.include_router(router)
    for path, name in PAGES.items():
        app.add_api_route(path, _page(name), include_in_schema=False)
    app.add_middleware(PushRoute, service=service, error_response=error_response)
    app.add_middleware(Guard, gate=service.gate, metrics=service.metrics)
    app.add_exception_handler(404, _say_missing)
    app.add_exception_handler(405, _say_methods)
    app.add_exception_handler(MoontideError, _error_response)
    app.add_exception_handler(RequestValidationError, _say_invalid)
    app.add_exception_handler(Exception, _say_bug)
    return app


def document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document; parameters that may be left out are not null where they are sent.

    >>> document(FastAPI())["openapi"][:2]
    '3.'
    """
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        for verbs in made["paths"].values():
            for parameter in (each for verb in verbs.values() for each in verb.get("parameters", ())):
                kinds = parameter["schema"].pop("anyOf", [])
                for kind in kinds:
                    if kind != {"type": "null"}:
                        parameter["schema"] |= kind
        app.openapi_schema = made
    return app.openapi_schema


def _page(name: str) -> Callable[[], Awaitable[Response]]:
    content = files("moontide.serve").joinpath("web", name).read_bytes()
    kind = KINDS[name.rpartition(".")[2]]

    async def page() -> Response:
        return Response(content, media_type=kind)

    return page


def error_response(error: Exception) -> JSONResponse:
    """Return the response for an error: its status, and its sentence.

    >>> error_response(GoneError("It is not there.")).body
    b'{"detail":"It is not there."}'
    """
    if isinstance(error, HTTPException):
        return JSONResponse({"detail": error.detail}, error.status_code, error.headers)
    status = next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)
    wait = error.retry_after if isinstance(error, BusyError) else 5
    headers = {"Retry-After": str(wait)} if status in (429, 503) else None
    return JSONResponse({"detail": str(error)}, status, headers)


async def _error_response(_: Request, error: Exception) -> JSONResponse:
    return error_response(error)


async def _say_missing(request: Request, _: Exception) -> JSONResponse:
    return JSONResponse({"detail": f"There is no path {request.url.path[:100]!r}; /docs lists those there are."}, 404)


async def _say_methods(request: Request, _: Exception) -> JSONResponse:
    """List all methods of a path, which may have several routes."""
    path = request.url.path
    found = {verb for route in router.routes if route.path_regex.match(path) for verb in route.methods}  # type: ignore[attr-defined]
    allowed = ", ".join(sorted(found or {"GET"}))
    return JSONResponse({"detail": f"This path takes {allowed}. Got {request.method[:20]!r}."}, 405, {"Allow": allowed})


async def _say_invalid(_: Request, error: Exception) -> JSONResponse:
    """Describe the first errors, without repeating the contents of the request."""
    found = error.errors() if isinstance(error, RequestValidationError) else []
    if any(each["type"] == "json_invalid" for each in found):
        return JSONResponse({"detail": "The body is not JSON."}, 400)
    return JSONResponse({"detail": in_words([{**each, "loc": each["loc"][1:] or each["loc"]} for each in found])}, 422)


async def _say_bug(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": "Internal error; see the server's log. The state is unchanged."}, 500)
