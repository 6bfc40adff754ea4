"""Routes for pushes of embeddings and images and for true labels, and helpers for all requests."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Header, HTTPException, Path, Request
from fastapi.responses import Response
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from moontide.errors import InputError, MoontideError
from moontide.serve.batching import BusyError, PushQueue, known_of
from moontide.serve.encoding import encode
from moontide.serve.images import MAX_IMAGES, KindError
from moontide.serve.models import EMBEDDINGS, IMAGES, KNOWN, Corrections, Predictions, status_words, whole
from moontide.serve.parsing import INLINE, check_rows, parse
from moontide.serve.records import Answer, Labels, columns
from moontide.serve.service import Service, class_numbers
from moontide.serve.state import GoneError

HOLD_SECONDS, LOOK_SECONDS = 4.0, 0.5  # that a push to a full queue is held before it is refused; between two looks
KEY, SHAPE = r"^[!-~]{1,128}$", r"^\d{1,6},\d{1,6}$"  # forms of headers

router = APIRouter(responses=status_words(400, 401, 403, 408, 413, 422, 429, 503))


Name = Annotated[str, Path(description="The name of the stream.")]


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _queue(request: Request, stream: Name) -> PushQueue:
    return (await _service(request)).queue(stream)


TheService = Annotated[Service, Depends(_service)]
TheQueue = Annotated[PushQueue, Depends(_queue)]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=KEY,
        description="A repeated push with the same key is not counted again: its first answer is returned.",
    ),
]
Shape = Annotated[
    str | None,
    Header(
        alias="X-Shape",
        pattern=SHAPE,
        description="Rows and columns of a raw body of little-endian float32, such as 64,512.",
    ),
]


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response of plain values, bypassing the models that document it."""
    return Response(encode(value).encode(), status, headers, "application/json")


class PushRoute:
    """A fast path for pushes of embeddings that bypasses FastAPI's routing, which costs more than everything else.

    FastAPI's own route of that path is what documents it.
    """

    path = re.compile(r"/streams/([^/]+)/embeddings")

    def __init__(self, app: ASGIApp, service: Service, error_response: Callable[[Exception], Response]) -> None:
        """Wrap an application; `error_response` makes the response for an error."""
        self.app, self.service, self.error_response = app, service, error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        found = self.path.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            return await self.app(scope, receive, send)
        request = Request(scope, receive)
        try:
            response = await push(self.service, request, found[1])
        except (MoontideError, HTTPException) as error:
            response = self.error_response(error)
        except ClientDisconnect:
            return None
        await response(scope, receive, send)


def header(request: Request, name: str, pattern: str, words: str) -> str | None:
    """Return a header, or None if it is missing."""
    value = request.headers.get(name)
    if value is not None and re.fullmatch(pattern, value) is None:
        raise InputError(f"'{name}' must be {words}. Got {value[:50]!r} instead.")
    return value


async def push_embeddings(request: Request, stream: Name, key: Key = None, shape: Shape = None) -> Response:
    """Push embeddings as JSON or raw float32; the answer comes once they are in the journal."""
    return await push(request.app.state.service, request, stream)


async def push(service: Service, request: Request, stream: str) -> Response:
    """Answer a push of embeddings to a stream."""
    key = header(request, "Idempotency-Key", KEY, "1 to 128 visible characters")
    shape = header(request, "X-Shape", SHAPE, "rows and columns, such as 64,512")
    queue, kind = service.queue(stream), media_type(request)
    if kind not in ("application/json", "application/octet-stream"):
        raise KindError(f"Embeddings must be application/json or application/octet-stream. Got {kind[:50]!r} instead.")
    await admit(request, queue, 1 if shape is None else int(shape.partition(",")[0]))
    body, known = await request.body(), None
    if kind == "application/octet-stream":
        large = len(body) > INLINE
        x = await service.aside(lambda: from_raw(body, shape)) if large else from_raw(body, shape)
    else:
        fields, x = await parsed(service, body, "embeddings", ("known",))
        if x is None:
            raise InputError("The body must be a JSON object with 'embeddings', one row per sample.")
        if fields.get("known") is not None:
            known = check_known(fields["known"], queue)
    return answered(queue, await service.push(queue, x, key, known))


def media_type(request: Request) -> str:
    """Return the media type of a body, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def parsed(service: Service, body: bytes, field: str, others: tuple[str, ...]) -> Any:
    """Read a JSON body; a large one on a thread, which waits for a process."""
    if len(body) <= INLINE:
        return parse(body, field, others)
    async with service.parsing:
        return await service.aside(lambda: parse(body, field, others))


async def admit(request: Request, queue: PushQueue, samples: int) -> None:
    """Hold back a push if the queue is full; refuse it if the queue is still full after that, or the stream busy."""
    deadline = time.monotonic() + HOLD_SECONDS
    while True:
        try:
            return queue.admit(samples)
        except BusyError:
            if queue.busy is not None or time.monotonic() >= deadline:
                request.scope["moontide.unread"] = True  # the rest is dropped as it comes, at hardly any cost
                raise
        await asyncio.sleep(min(LOOK_SECONDS, HOLD_SECONDS))


def check_known(known: Any, queue: PushQueue) -> Labels:
    """Check the list of known labels of a push."""
    known = [whole(label) for label in known] if isinstance(known, list) else known
    good = isinstance(known, list) and all(
        label is None or isinstance(label, str) or type(label) is int for label in known
    )
    if not good:
        raise InputError("'known' must be a list of class names, class numbers, or null for unknown labels.")
    return class_numbers(known, queue.stream.config.class_names, "known")


@router.post(
    "/streams/{stream}/known", response_model=Corrections, responses=status_words(404, 415), openapi_extra=KNOWN
)
async def correct(request: Request, service: TheService, queue: TheQueue, key: Key = None) -> Response:
    """Set the true labels of samples that were answered before; the next micro-batch uses them.

    Samples are numbered along the stream, and must be in the window; a label is a class name or number, or null to
    take one back. The method must be one that can use known labels.
    """
    if media_type(request) != "application/json":
        raise KindError("Corrections must be application/json.")
    fields, _ = parse(await request.body(), "", ("samples", "labels"))
    samples, labels = fields.get("samples", []), fields.get("labels")
    samples = [whole(n) for n in samples] if isinstance(samples, list) else []
    if not samples or not all(type(n) is int and n >= 0 for n in samples) or not isinstance(labels, list):
        raise InputError("The body must have 'samples', a list of sample numbers, and 'labels', one for each.")
    if max(samples) >= 2**53:
        raise GoneError("The stream has no sample with such a number.")
    labels = [whole(label) for label in labels]
    check_known(labels, queue)
    done = await service.correct(queue, samples, labels, key)
    fields = {"samples": done.samples.tolist(), "known": known_of(done.labels)}
    names = queue.stream.config.class_names
    fields["class_names"] = [None if label is None else names[label] for label in fields["known"]]
    return reply(fields, headers={"Idempotency-Replayed": "true"} if done.repeated else None)


@router.post(
    "/streams/{stream}/images", response_model=Predictions, responses=status_words(404, 415), openapi_extra=IMAGES
)
async def push_images(request: Request, service: TheService, queue: TheQueue, key: Key = None) -> Response:
    """Push JPEG, PNG or WebP images as form parts named `images`, if the server has an encoder."""
    if media_type(request) != "multipart/form-data":
        raise KindError("Images must be sent as multipart/form-data.")
    await admit(request, queue, 1)
    async with request.form(max_files=MAX_IMAGES, max_fields=1) as form:
        parts = form.getlist("images")
        if set(form) - {"images"} or not all(isinstance(part, UploadFile) for part in parts):
            raise InputError("The form must have files as parts 'images' and nothing else.")
        files = [await part.read() for part in parts if isinstance(part, UploadFile)]
    return answered(queue, await service.push_images(queue, files, key))


router.add_api_route(
    "/streams/{stream}/embeddings",
    push_embeddings,
    methods=["POST"],
    response_model=Predictions,
    responses=status_words(404, 415),
    openapi_extra=EMBEDDINGS,
)


def answered(queue: PushQueue, answer: Answer) -> Response:
    """Return the answer to a push."""
    fields = columns(answer.first, answer.rows, queue.stream.config.class_names)
    return reply(fields, headers={"Idempotency-Replayed": "true"} if answer.repeated else None)


def from_raw(body: bytes, shape: str | None) -> Any:
    """Read little-endian float32 of a given shape.

    >>> from_raw(bytes(4) + b"\\0\\0\\x80?", "1,2")
    array([[0., 1.]], dtype=float32)
    """
    if shape is None:
        raise InputError("A raw body needs the header 'X-Shape: rows,columns', such as 64,512.")
    n, d = map(int, shape.split(","))
    if len(body) != 4 * n * d:
        raise InputError(
            f"'X-Shape' {shape} of float32 is {4 * n * d} bytes. Got {len(body)} instead; is it of another dtype?"
        )
    return check_rows(np.frombuffer(body, "<f4").reshape(n, d), "embeddings")
