"""The HTTP routes other than `pushes`. `/docs` on a server lists them, and `docs/serve.md` explains them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import Path, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError

import moontide
from moontide.errors import InputError
from moontide.registry import method_type
from moontide.serve.batching import Listener, PushQueue
from moontide.serve.encoding import encode_in_pieces
from moontide.serve.images import MAX_IMAGES, KindError, sniff
from moontide.serve.models import (
    DEFAULT_METHOD,
    MAX_PROMPTS,
    MAX_PUSH,
    NEW_STREAM,
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
)
from moontide.serve.pushes import TheQueue, TheService, media_type, parsed, reply, router
from moontide.serve.records import columns, numbers
from moontide.serve.service import sample_set, usable_methods
from moontide.serve.state import GoneError

MAX_PREDICTIONS = 10_000  # of one request
HEARTBEAT = 15.0  # seconds after which an idle event stream gives a sign of life
MISSING = status_words(404)
Number = Annotated[int, Path(ge=0, le=2**53)]

__all__ = ["router"]


@router.get("/streams/{stream}/predictions", response_model=Predictions, responses=MISSING)
async def predictions(
    service: TheService,
    queue: TheQueue,
    first: Annotated[int, Query(ge=0, le=2**53, description="The number of the first sample.")] = 0,
    size: Annotated[int, Query(ge=1, le=MAX_PREDICTIONS)] = 1000,
) -> Response:
    """Return earlier answers by sample number, without those that are no longer kept."""

    def answer() -> Response:
        return reply(columns(*queue.stream.predictions(first, size), queue.stream.config.class_names))

    return await service.aside(answer)


@router.post("/streams/{stream}/revise", response_model=Revision, responses=status_words(404, 409))
async def revise(service: TheService, queue: TheQueue) -> Response:
    """Predict the samples of the window again with the current state; nothing is counted again and nothing changes."""
    moment, (first, rows, beta) = await service.revise(queue)
    fields = columns(first, rows, queue.stream.config.class_names)
    return reply({**fields, "seen": moment.state.seen, "beta": numbers(beta)})


@router.get("/streams/{stream}/map", response_model=FlatMap, responses=status_words(404, 409))
async def flat_map(service: TheService, queue: TheQueue) -> Response:
    """Return a map of the window's samples, by t-SNE: those with similar embeddings lie close together."""
    first, points, rows = await service.flat_map(queue)
    x, y = points.T.round(5).tolist()
    return reply({**columns(first, rows, queue.stream.config.class_names), "x": x, "y": y})


@router.get("/streams/{stream}/events", responses=MISSING, response_class=StreamingResponse)
async def events(request: Request, service: TheService, queue: TheQueue) -> StreamingResponse:
    """Follow a stream by server-sent events, as JSON: `batch` with the predictions of each micro-batch, and `known`
    with the labels of each correction.

    A listener that falls too far behind is disconnected; it can get what it missed from `predictions`. So is one whose
    token has been revoked or has expired.
    """

    def admitted() -> bool:
        return service.gate.refusal(request.scope) is None

    return StreamingResponse(_events(queue, queue.listen(), admitted), media_type="text/event-stream")


async def _events(queue: PushQueue, listener: Listener, admitted: Callable[[], bool]) -> AsyncIterator[bytes]:
    try:
        yield b": welcome\n\n"
        while True:
            try:
                event = await asyncio.wait_for(listener.next(), HEARTBEAT)
            except asyncio.TimeoutError:
                event = b": still here\n\n"
            if event is None or not admitted():
                return
            yield event
    finally:
        queue.listeners.discard(listener)


# The server


@router.get("/server")
async def server(service: TheService) -> ServerInfo:
    """Describe the capabilities of this server."""
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
    """List the streams; a token for one stream sees only that stream."""
    only = request.scope.get("moontide.stream")
    return [
        Summary(
            name=name, method=queue.stream.config.method, source=queue.stream.config.source,
            classes=len(queue.stream.config.class_names), dim=queue.stream.config.dim,
            created=queue.stream.config.created, seen=queue.stream.moment.state.seen if queue.stream.moment else None,
        )
        for name, queue in sorted(service.queues.items())
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
    content, start = await request.body(), time.monotonic()
    asked, prototypes = await parsed(service, content, "prototypes", fields)
    if isinstance(asked.get("options"), dict) and len(asked["options"]) > 100:
        raise InputError("'options' may have 100 entries, and has more.")
    if isinstance(asked.get("classes"), list) and not all(isinstance(name, str) for name in asked["classes"]):
        raise InputError("'classes' must be a list of names.")
    if not (asked.get("synonyms") is None or are_prompts(asked["synonyms"])):
        raise InputError(f"'synonyms' must have a list of at most {MAX_PROMPTS} texts for each class name.")
    try:
        new = NewStream.model_validate(asked)
    except ValidationError as error:
        raise InputError(in_words(error.errors(include_url=False, include_input=False))) from None
    values = new.model_dump(exclude={"method", "prototypes"})
    spent = time.monotonic() - start
    queue = await service.create(method_name=new.method, prototypes=prototypes, spent=spent, **values)
    return await description(queue, 201)


def are_prompts(value: Any) -> bool:
    """Tell whether a value is lists of texts by name; a model would name every one that is not.

    >>> are_prompts({"cat": ["a cat"]}), are_prompts({"cat": [1]})
    (True, False)
    """
    return isinstance(value, dict) and all(
        isinstance(texts, list) and len(texts) <= MAX_PROMPTS and all(isinstance(text, str) for text in texts)
        for texts in value.values()
    )


@router.get("/streams/{stream}", response_model=Description, responses=MISSING)
async def describe(queue: TheQueue) -> Response:
    """Describe a stream: its configuration and statistics."""
    return await description(queue)


async def description(queue: PushQueue, status: int = 200) -> Response:
    """Return the description of a stream."""
    config, moment = queue.stream.config, await queue.moment()
    shown = ("method", "source", "dim", "logit_scale", "max_batch", "max_wait_ms", "window", "created")
    counts = moment.tally.counts.tolist()
    options = {key: "inf" if value == math.inf else value for key, value in config.options.items()}
    about = {
        "name": queue.stream.name, **{key: getattr(config, key) for key in shown}, "options": options,
        "class_names": list(config.class_names), "seen": moment.state.seen, "total": moment.total,
        "kept": min(moment.kept, config.window), "waiting": queue.samples, "batches": moment.seq,
        "changed": moment.tally.changed, "counts": counts[0], "zero_shot_counts": counts[1],
        "beta": numbers(moment.tally.beta),
    }  # fmt: skip
    return Response(await encode_in_pieces(about), status, media_type="application/json")


@router.delete("/streams/{stream}", status_code=204, responses=MISSING)
async def delete(service: TheService, stream: str) -> None:
    """Delete a stream and its data."""
    await service.delete(stream)


# States


@router.get("/streams/{stream}/state", responses=MISSING, response_class=Response)
async def state(
    service: TheService,
    queue: TheQueue,
    snapshot: Annotated[
        int | None, Query(ge=0, le=2**53, description="A snapshot (default: the current state).")
    ] = None,
) -> Response:
    """Download a state as a .safetensors file for `moontide stream --resume`."""
    stream, moment = queue.stream, await queue.moment()
    saved = await service.aside(lambda: stream.saved(moment) if snapshot is None else stream.snapshot(snapshot))
    headers = {"content-disposition": f'attachment; filename="{stream.name}.safetensors"'}
    return Response(saved.state, headers=headers, media_type="application/octet-stream")


@router.get("/streams/{stream}/snapshots", responses=MISSING)
async def snapshots(service: TheService, queue: TheQueue) -> list[SnapshotInfo]:
    """List the snapshots of a stream."""
    found = await service.aside(lambda: service.store.snapshots(queue.stream.name))
    return [SnapshotInfo(**each._asdict()) for each in found]


@router.post("/streams/{stream}/snapshots", status_code=201, responses=MISSING)
async def take_snapshot(service: TheService, queue: TheQueue) -> SnapshotInfo:
    """Save the state after all earlier pushes."""
    return SnapshotInfo(**(await service.snapshot(queue))._asdict())


@router.delete("/streams/{stream}/snapshots/{number}", status_code=204, responses=MISSING)
async def delete_snapshot(queue: TheQueue, number: Annotated[int, Path(ge=1, le=2**53)]) -> None:
    """Delete a snapshot; number 0, the start, stays."""
    await queue.call(lambda: queue.stream.delete_snapshot(number))


@router.post("/streams/{stream}/restore", response_model=Description, responses=MISSING)
async def restore(queue: TheQueue, to: Restore) -> Response:
    """Go back to a snapshot: its state and counts; the window is empty, and the numbers of samples go on."""
    await queue.call(lambda: queue.stream.restore(to.snapshot))
    return await description(queue)


@router.post("/streams/{stream}/reset", response_model=Description, responses=MISSING)
async def reset(queue: TheQueue) -> Response:
    """Go back to the start, snapshot 0."""
    await queue.call(lambda: queue.stream.restore(0))
    return await description(queue)


# Health


@router.get("/healthz")
async def healthy() -> dict[str, str]:
    """Confirm that the process is alive."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"description": "Not ready"}})
async def ready(service: TheService) -> JSONResponse:
    """Report whether the server accepts pushes: `status` is ready, loading, closing or failing.

    `failed` names streams that cannot be read, `problems` what else is wrong; a busy stream does not stop the others.
    """
    states = {"closing": service.closing, "loading": service.loading, "failing": service.trouble}
    status = next((name for name, there in states.items() if there), "ready")
    report = {"status": status, "failed": service.failed, "problems": service.problems()}
    return JSONResponse(report, 200 if status == "ready" else 503)


@router.get("/metrics", response_class=Response)
async def metrics(service: TheService) -> Response:
    """Return counters in Prometheus' text format."""
    queues = service.queues.items()
    gauges: dict[str, dict[str, float]] = {
        "moontide_waiting_samples": {name: queue.samples for name, queue in queues},
        "moontide_seen_samples": {
            name: queue.stream.moment.state.seen for name, queue in queues if queue.stream.moment
        },
        "moontide_listeners": {name: len(queue.listeners) for name, queue in queues},
        "moontide_busy": {name: float(queue.busy is not None) for name, queue in queues},
    }
    return Response(service.metrics.text(gauges), media_type="text/plain; version=0.0.4; charset=utf-8")
