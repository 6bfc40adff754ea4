"""What is asked for by which path. `/docs` on a server shows it, `docs/serve.md` explains it."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Header, Path, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.datastructures import UploadFile

import moontide
from moontide.errors import InputError
from moontide.registry import method_type
from moontide.serve.batching import BusyError, Line, Listener, known_of
from moontide.serve.images import MAX_IMAGES, KindError, sniff
from moontide.serve.models import (
    DEFAULT_METHOD,
    EMBEDDINGS,
    IMAGES,
    KNOWN,
    MAX_PUSH,
    NEW_STREAM,
    Corrections,
    Description,
    FlatMap,
    NewStream,
    Predictions,
    Restore,
    Revision,
    ServerInfo,
    SnapshotInfo,
    Summary,
    in_words,
    status_words,
    whole,
)
from moontide.serve.parsing import INLINE, check_rows, parse
from moontide.serve.records import Answer, Labels, columns, numbers
from moontide.serve.service import Service, class_numbers, sample_set, usable_methods
from moontide.serve.state import GoneError

MAX_PREDICTIONS = 10_000  # of one request
HOLD_SECONDS = 2.0  # that a push to a full line is held back before it is refused, so that refusing costs little
HEARTBEAT = 15.0  # seconds after which an idle event stream gives a sign of life
KEY, SHAPE = r"^[!-~]{1,128}$", r"^\d{1,6},\d{1,6}$"  # forms of headers
MISSING = status_words(404)

router = APIRouter(responses=status_words(400, 401, 403, 408, 413, 422, 429, 503))


Name = Annotated[str, Path(description="The name of the stream.")]


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _line(request: Request, stream: Name) -> Line:
    return (await _service(request)).line(stream)


TheService = Annotated[Service, Depends(_service)]
TheLine = Annotated[Line, Depends(_line)]
Number = Annotated[int, Path(ge=0, le=2**53)]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=KEY,
        description="A push that was answered under the same key is not counted again: its first answer is returned.",
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
    """Return a JSON response of plain values, without a pass through the models that document it."""
    content = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return Response(content, status, headers, "application/json")


# Samples, first: routes are tried in order


class Direct(APIRoute):
    """A push of embeddings, without FastAPI's sorting of parameters, which would take as long as all else here."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Read the parameters that the function documents from the request."""

        async def handle(request: Request) -> Response:
            key = header(request, "Idempotency-Key", KEY, "1 to 128 visible characters")
            shape = header(request, "X-Shape", SHAPE, "rows and columns, such as 64,512")
            response: Response = await self.endpoint(request, request.path_params["stream"], key, shape)
            return response

        return handle


def header(request: Request, name: str, pattern: str, words: str) -> str | None:
    """Return a header, or None where it is not there."""
    value = request.headers.get(name)
    if value is not None and re.fullmatch(pattern, value) is None:
        raise InputError(f"'{name}' must be {words}. Got {value[:50]!r} instead.")
    return value


async def push_embeddings(request: Request, stream: Name, key: Key = None, shape: Shape = None) -> Response:
    """Push embeddings as JSON or as raw float32, and get their predictions when they are safe in the journal."""
    service: Service = request.app.state.service
    line = service.line(stream)
    kind = media_type(request)
    if kind not in ("application/json", "application/octet-stream"):
        raise KindError(f"Embeddings must be application/json or application/octet-stream. Got {kind[:50]!r} instead.")
    await admit(request, line, 1 if shape is None else int(shape.partition(",")[0]))
    body, known = await request.body(), None
    if kind == "application/octet-stream":
        large = len(body) > INLINE
        x = await service.aside(lambda: from_raw(body, shape)) if large else from_raw(body, shape)
    else:
        rest, x = await parsed(service, body, "embeddings", ("known",))
        if x is None:
            raise InputError("The body must be a JSON object with 'embeddings', one row per sample.")
        if rest.get("known") is not None:
            known = check_known(rest["known"], line)
    return answered(line, await service.push(line, x, key, known))


def media_type(request: Request) -> str:
    """Return the media type of a body, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def parsed(service: Service, body: bytes, field: str, others: tuple[str, ...]) -> Any:
    """Read a JSON body; a large one on a thread, which waits for a process."""
    if len(body) <= INLINE:
        return parse(body, field, others)
    async with service.parsing:
        return await service.aside(lambda: parse(body, field, others))


async def admit(request: Request, line: Line, samples: int) -> None:
    """Hold back a push that the line has no room for; refuse it where there is none after that either."""
    try:
        line.admit(samples)
    except BusyError as busy:
        await asyncio.sleep(min(HOLD_SECONDS, busy.retry_after))
        try:
            line.admit(samples)
        except BusyError:
            async for _ in request.stream():  # so that the connection can be used again
                pass
            raise


def check_known(known: Any, line: Line) -> Labels:
    """Check the list of known labels of a push."""
    known = [whole(label) for label in known] if isinstance(known, list) else known
    good = isinstance(known, list) and all(
        label is None or isinstance(label, str) or type(label) is int for label in known
    )
    if not good:
        raise InputError("'known' must be a list of class names, class numbers, or null where a label is not known.")
    return class_numbers(known, line.stream.config.class_names, "known")


@router.post(
    "/streams/{stream}/known", response_model=Corrections, responses=status_words(404, 415), openapi_extra=KNOWN
)
async def correct(request: Request, service: TheService, line: TheLine, key: Key = None) -> Response:
    """Tell the true labels of samples that were answered before; the next micro-batch makes use of them.

    Samples are numbered along the stream, and must be in the window; a label is a class name or number, or null to
    take one back. The method must be one that can use known labels.
    """
    if media_type(request) != "application/json":
        raise KindError("Corrections must be application/json.")
    rest, _ = parse(await request.body(), "", ("samples", "labels"))
    samples, labels = rest.get("samples", []), rest.get("labels")
    samples = [whole(n) for n in samples] if isinstance(samples, list) else []
    if not samples or not all(type(n) is int and n >= 0 for n in samples) or not isinstance(labels, list):
        raise InputError("The body must have 'samples', a list of sample numbers, and 'labels', one for each.")
    if max(samples) >= 2**53:
        raise GoneError("The stream has no sample of such a number.")
    labels = [whole(label) for label in labels]
    check_known(labels, line)
    done = await service.correct(line, samples, labels, key)
    told = {"samples": done.samples.tolist(), "known": known_of(done.labels)}
    names = line.stream.config.class_names
    told["class_names"] = [None if label is None else names[label] for label in told["known"]]
    return reply(told, headers={"Idempotency-Replayed": "true"} if done.repeated else None)


@router.post(
    "/streams/{stream}/images", response_model=Predictions, responses=status_words(404, 415), openapi_extra=IMAGES
)
async def push_images(request: Request, service: TheService, line: TheLine, key: Key = None) -> Response:
    """Push JPEG, PNG or WebP images as the parts `images` of a form, where the server has an encoder."""
    if media_type(request) != "multipart/form-data":
        raise KindError("Images must be sent as multipart/form-data.")
    await admit(request, line, 1)
    async with request.form(max_files=MAX_IMAGES, max_fields=1) as form:
        parts = form.getlist("images")
        if set(form) - {"images"} or not all(isinstance(part, UploadFile) for part in parts):
            raise InputError("The form must have files as parts 'images' and nothing else.")
        files = [await part.read() for part in parts if isinstance(part, UploadFile)]
    return answered(line, await service.push_images(line, files, key))


router.add_api_route(
    "/streams/{stream}/embeddings",
    push_embeddings,
    methods=["POST"],
    response_model=Predictions,
    responses=status_words(404, 415),
    openapi_extra=EMBEDDINGS,
    route_class_override=Direct,
)


def answered(line: Line, answer: Answer) -> Response:
    """Return the answer to a push."""
    told = columns(answer.first, answer.rows, line.stream.config.class_names)
    return reply(told, headers={"Idempotency-Replayed": "true"} if answer.repeated else None)


def from_raw(body: bytes, shape: str | None) -> Any:
    """Read little-endian float32 of a shape that is said.

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


@router.get("/streams/{stream}/predictions", response_model=Predictions, responses=MISSING)
async def predictions(
    service: TheService,
    line: TheLine,
    first: Annotated[int, Query(ge=0, le=2**53, description="The number of the first sample.")] = 0,
    size: Annotated[int, Query(ge=1, le=MAX_PREDICTIONS)] = 1000,
) -> Response:
    """Return what was answered for samples by their numbers; those that are no longer kept are left out."""

    def told() -> Response:
        return reply(columns(*line.stream.predictions(first, size), line.stream.config.class_names))

    return await service.aside(told)


@router.post("/streams/{stream}/revise", response_model=Revision, responses=status_words(404, 409))
async def revise(service: TheService, line: TheLine) -> Response:
    """Predict the window's samples again with the state as it is now; nothing is counted again, nothing changes."""
    moment = await line.moment()
    first, rows, beta = await service.aside(lambda: line.stream.revise(moment))
    told = columns(first, rows, line.stream.config.class_names)
    return reply({**told, "seen": moment.state.seen, "beta": numbers(beta)})


@router.get("/streams/{stream}/map", response_model=FlatMap, responses=status_words(404, 409))
async def flat_map(service: TheService, line: TheLine) -> Response:
    """Return the window's samples in the plane in which they differ most, their first two principal components."""
    first, places, rows = await service.flat_map(line)
    x, y = places.T.round(5).tolist()
    return reply({**columns(first, rows, line.stream.config.class_names), "x": x, "y": y})


@router.get("/streams/{stream}/events", responses=MISSING, response_class=StreamingResponse)
async def events(line: TheLine) -> StreamingResponse:
    """Follow a stream by server-sent events, as JSON: `batch` with the predictions of each micro-batch, and `known`
    with the labels of each correction.

    A listener that falls too far behind is cut off; it gets what it missed from `predictions`, by numbers.
    """
    return StreamingResponse(_events(line, line.listen()), media_type="text/event-stream")


async def _events(line: Line, listener: Listener) -> AsyncIterator[bytes]:
    try:
        yield b": welcome\n\n"
        while True:
            try:
                event = await asyncio.wait_for(listener.next(), HEARTBEAT)
            except asyncio.TimeoutError:
                yield b": still here\n\n"
                continue
            if event is None:
                return
            yield event
    finally:
        line.listeners.discard(listener)


# The server


@router.get("/server")
async def server(service: TheService) -> ServerInfo:
    """Say what this server can do."""
    return ServerInfo(
        version=moontide.__version__,
        encoder=None if service.encoder is None else service.encoder.id,
        methods=usable_methods(),
        default_method=DEFAULT_METHOD,
        accept_known=[name for name in usable_methods() if "known" in method_type(name).accepts],
        sample_images=len(service.samples),
        max_push=MAX_PUSH,
        max_images=MAX_IMAGES,
        max_body=service.gate.max_body,
    )


@router.get("/samples/simulated", response_class=Response)
async def simulated(service: TheService) -> Response:
    """Return the simulated sample set: raw float32 embeddings, drawn by a program and not from any image.

    The header X-Shape has rows and columns, X-Labels the true classes, for a page to count what is right.
    """
    data = await service.aside(sample_set)
    headers = {"X-Shape": ",".join(map(str, data.features.shape)), "X-Labels": ",".join(map(str, data.labels))}
    return Response(data.features.astype("<f4").tobytes(), headers=headers, media_type="application/octet-stream")


@router.get("/samples/images/{number}", responses=MISSING, response_class=Response)
async def sample_image(service: TheService, number: Number) -> Response:
    """Return an image of the operator's sample folder; the header X-Label has the name of the folder it lies in."""
    if number >= len(service.samples):
        raise GoneError(f"There is no sample image {number}.")
    path = service.samples[number]
    data = await service.aside(path.read_bytes)
    label = path.parent.name.encode("ascii", "replace").decode()
    return Response(data, headers={"X-Label": label}, media_type=f"image/{str(sniff(data)).lower()}")


# Streams


@router.get("/streams")
async def streams(request: Request, service: TheService) -> list[Summary]:
    """List the streams; a token of one stream sees that."""
    only = request.scope.get("moontide.stream")
    return [
        Summary(
            name=name, method=line.stream.config.method, source=line.stream.config.source,
            classes=len(line.stream.config.class_names), dim=line.stream.config.dim,
            created=line.stream.config.created, seen=line.stream.moment.state.seen if line.stream.moment else None,
        )
        for name, line in sorted(service.lines.items())
        if only in (None, name)
    ]  # fmt: skip


@router.post(
    "/streams", status_code=201, response_model=Description, responses=status_words(409, 415), openapi_extra=NEW_STREAM
)
async def create(request: Request, service: TheService) -> Response:
    """Make a stream."""
    if media_type(request) != "application/json":
        raise KindError("A new stream must be application/json.")
    fields = tuple(name for name in NewStream.model_fields if name != "prototypes")
    rest, prototypes = await parsed(service, await request.body(), "prototypes", fields)
    if isinstance(rest.get("options"), dict) and len(rest["options"]) > 100:
        raise InputError("'options' may have 100 entries, and has more.")
    if isinstance(rest.get("classes"), list) and not all(isinstance(name, str) for name in rest["classes"]):
        raise InputError("'classes' must be a list of names.")
    try:
        new = NewStream.model_validate(rest)
    except ValidationError as error:
        raise InputError(in_words(error.errors(include_url=False, include_input=False))) from None
    values = new.model_dump(exclude={"method", "prototypes"})
    line = await service.create(method_name=new.method, prototypes=prototypes, **values)
    return reply(await description(line), 201)


@router.get("/streams/{stream}", response_model=Description, responses=MISSING)
async def describe(line: TheLine) -> Response:
    """Describe a stream: what it was made with, and its statistics."""
    return reply(await description(line))


async def description(line: Line) -> dict[str, Any]:
    """Return what is told of a stream."""
    config, moment = line.stream.config, await line.moment()
    told = ("method", "source", "dim", "logit_scale", "max_batch", "max_wait_ms", "window", "created")
    counts = moment.tally.counts.tolist()
    options = {key: "inf" if value == math.inf else value for key, value in config.options.items()}
    return {
        "name": line.stream.name, **{key: getattr(config, key) for key in told}, "options": options,
        "class_names": list(config.class_names), "seen": moment.state.seen, "total": moment.total,
        "kept": min(moment.kept, config.window), "waiting": line.samples, "batches": moment.seq,
        "changed": moment.tally.changed, "counts": counts[0], "zero_shot_counts": counts[1],
        "beta": numbers(moment.tally.beta),
    }  # fmt: skip


@router.delete("/streams/{stream}", status_code=204, responses=MISSING)
async def delete(service: TheService, stream: str) -> None:
    """Delete a stream with all that belongs to it."""
    await service.delete(stream)


# States


@router.get("/streams/{stream}/state", responses=MISSING, response_class=Response)
async def state(
    service: TheService,
    line: TheLine,
    snapshot: Annotated[int | None, Query(ge=0, le=2**53, description="A snapshot; else the state now.")] = None,
) -> Response:
    """Download a state as a .safetensors file that `moontide stream --resume` goes on from."""
    stream, moment = line.stream, await line.moment()
    saved = await service.aside(lambda: stream.saved(moment) if snapshot is None else stream.snapshot(snapshot))
    headers = {"content-disposition": f'attachment; filename="{stream.name}.safetensors"'}
    return Response(saved.state, headers=headers, media_type="application/octet-stream")


@router.get("/streams/{stream}/snapshots", responses=MISSING)
async def snapshots(service: TheService, line: TheLine) -> list[SnapshotInfo]:
    """List the snapshots of a stream."""
    found = await service.aside(lambda: service.store.snapshots(line.stream.name))
    return [SnapshotInfo(**each._asdict()) for each in found]


@router.post("/streams/{stream}/snapshots", status_code=201, responses=MISSING)
async def take_snapshot(service: TheService, line: TheLine) -> SnapshotInfo:
    """Keep the state after all pushes that came before."""
    return SnapshotInfo(**(await service.snapshot(line))._asdict())


@router.delete("/streams/{stream}/snapshots/{number}", status_code=204, responses=MISSING)
async def delete_snapshot(line: TheLine, number: Annotated[int, Path(ge=1, le=2**53)]) -> None:
    """Delete a snapshot; number 0, the start, stays."""
    await line.call(lambda: line.stream.delete_snapshot(number))


@router.post("/streams/{stream}/restore", response_model=Description, responses=MISSING)
async def restore(line: TheLine, to: Restore) -> Response:
    """Go back to a snapshot: its state and counts; the window is empty, and the numbers of samples go on."""
    await line.call(lambda: line.stream.restore(to.snapshot))
    return reply(await description(line))


@router.post("/streams/{stream}/reset", response_model=Description, responses=MISSING)
async def reset(line: TheLine) -> Response:
    """Go back to the start, snapshot 0."""
    await line.call(lambda: line.stream.restore(0))
    return reply(await description(line))


# Health


@router.get("/healthz")
async def healthy() -> dict[str, str]:
    """Say that the process is alive."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"description": "Not yet, no longer, or not now"}})
async def ready(service: TheService) -> JSONResponse:
    """Say whether pushes are taken, and why not: `status` is ready, loading, closing or failing.

    `failed` names streams that cannot be read, `problems` what else is wrong; a busy stream does not stop the others.
    """
    states = {"closing": service.closing, "loading": service.loading, "failing": service.trouble}
    status = next((name for name, there in states.items() if there), "ready")
    told = {"status": status, "failed": service.failed, "problems": service.problems()}
    return JSONResponse(told, 200 if status == "ready" else 503)


@router.get("/metrics", response_class=Response)
async def metrics(service: TheService) -> Response:
    """Return counters in Prometheus' text format."""
    lines = service.lines.items()
    gauges: dict[str, dict[str, float]] = {
        "moontide_waiting_samples": {name: line.samples for name, line in lines},
        "moontide_seen_samples": {name: line.stream.moment.state.seen for name, line in lines if line.stream.moment},
        "moontide_listeners": {name: len(line.listeners) for name, line in lines},
        "moontide_busy": {name: float(line.busy is not None) for name, line in lines},
    }
    return Response(service.metrics.text(gauges), media_type="text/plain; version=0.0.4; charset=utf-8")
