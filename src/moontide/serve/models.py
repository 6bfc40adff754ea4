"""Models of requests and answers, from which the OpenAPI document is generated."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from moontide.serve.parsing import MAX_CLASSES

MAX_PUSH = 4096  # samples
MAX_PROMPTS = 100  # of a class, besides its name
DEFAULT_METHOD = "tide"
Value = bool | int | float | str  # of an option


def whole(value: Any) -> Any:
    """Return a number such as 3.0, which is an integer in JSON, as one; anything else as it is.

    >>> whole(3.0), whole("3")
    (3, '3')
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]


def with_name(template: str) -> str:
    """Refuse a template without a placeholder for the class.

    >>> with_name("a photo of a {}.")
    'a photo of a {}.'
    """
    if "{}" not in template:
        raise ValueError("it must contain {} in place of the class name")
    return template


Template = Annotated[str, AfterValidator(with_name), WithJsonSchema({"type": "string", "pattern": r"\{\}"})]


class NewStream(BaseModel):
    """A stream to create: from `prototypes`, from `classes` that the server's encoder embeds, or from a sample set."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$", description="Default: a random name.")
    classes: list[str] | None = Field(None, min_length=1, max_length=MAX_CLASSES, description="Class names.")
    synonyms: dict[str, Annotated[list[str], Field(max_length=MAX_PROMPTS)]] | None = Field(
        None,
        max_length=MAX_CLASSES,
        description="Synonyms and descriptions of classes, by name; a class is the mean of all its prompts.",
    )
    prototypes: list[list[float]] | None = Field(None, description="Class embeddings, K rows of d numbers.")
    sample: Literal["simulated"] | None = Field(None, description="The classes of the simulated sample set.")
    template: Template | None = Field(
        None, max_length=200, description="A prompt with {} for the class; default: the encoder's."
    )
    method: str = Field(DEFAULT_METHOD, max_length=100, description="A method of GET /server.")
    preset: str | None = Field(None, max_length=100)
    options: dict[str, Value] = Field({}, description="Options of the method; 'inf' for infinity.")
    logit_scale: float | None = Field(
        None, ge=1e-6, le=1e6, description="1 / temperature; default: the encoder's, or 100."
    )
    max_batch: Whole = Field(64, ge=1, le=MAX_PUSH, description="Samples that start a micro-batch at once.")
    max_wait_ms: float = Field(
        10.0, ge=0, le=10_000, description="How long a push waits for others, after a micro-batch of several pushes."
    )
    window: Whole = Field(512, ge=1, le=MAX_PUSH, description="Last samples that can be predicted again.")


class Summary(BaseModel):
    """A stream in a list."""

    name: str
    method: str
    source: str = Field(description="'prototypes', 'simulated', or the id of the encoder.")
    classes: int
    dim: int
    created: float
    seen: int | None = Field(description="Samples in the state; null while it is being loaded.")


class Description(BaseModel):
    """A stream and its statistics; lists are by class."""

    name: str
    method: str
    options: dict[str, Value]
    source: str
    class_names: list[str]
    dim: int
    logit_scale: float
    max_batch: int
    max_wait_ms: float
    window: int
    created: float
    seen: int = Field(description="Samples in the state, since the start or the last reset.")
    total: int = Field(description="Samples ever; the next one has this number.")
    kept: int = Field(description="Samples in the window.")
    waiting: int = Field(description="Samples in line.")
    batches: int = Field(description="Micro-batches ever.")
    changed: int = Field(description="Predictions that differ from zero-shot.")
    counts: list[int] = Field(description="Predictions of each class.")
    zero_shot_counts: list[int]
    beta: list[float] | None = Field(description="How far each class moved from its text in the last micro-batch.")


class Predictions(BaseModel):
    """Predictions of consecutive samples, from number `first` on, adapted and zero-shot; lists are by sample."""

    first: int
    size: int
    labels: list[int]
    class_names: list[str]
    confidence: list[float]
    zero_shot_labels: list[int]
    zero_shot_class_names: list[str]
    zero_shot_confidence: list[float]
    known: list[int | None] = Field(description="Known true classes, or null.")


class Corrections(BaseModel):
    """Known labels of samples; lists have one entry per sample, null for a withdrawn label."""

    samples: list[int]
    known: list[int | None]
    class_names: list[str | None]


class Revision(Predictions):
    """Predictions of the window's samples with the state as it is now."""

    seen: int
    beta: list[float] | None


class FlatMap(Predictions):
    """A map of the window's samples: those with similar embeddings lie close together."""

    x: list[float]
    y: list[float]


class SnapshotInfo(BaseModel):
    """A state that is kept; number 0 is the start."""

    number: int
    seen: int
    created: float


class Restore(BaseModel):
    """The snapshot to restore."""

    model_config = ConfigDict(extra="forbid", strict=True)

    snapshot: Whole = Field(ge=0, le=2**53)


class ServerInfo(BaseModel):
    """The capabilities of this server."""

    version: str
    encoder: str | None
    methods: list[str]
    default_method: str
    accept_known: list[str] = Field(description="Methods that can use known labels.")
    sample_images: int
    max_push: int
    max_images: int
    max_body: int


def status_words(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe error statuses for the OpenAPI document.

    >>> status_words(404)[404]["description"]
    'Not Found'
    """
    schema = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
    content = {"application/json": {"schema": schema}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def in_words(found: Sequence[Any]) -> str:
    """Describe the first errors in a request, without repeating its contents.

    >>> in_words([{"loc": ("window",), "msg": "Input should be greater than 0"}])
    "'window': Input should be greater than 0."
    """
    problems = [f"'{'.'.join(map(str, each['loc']))}': {each['msg']}" for each in found[:3]]
    return "; ".join(problems)[:500] + "."


def body(**kinds: dict[str, Any]) -> dict[str, Any]:
    """Describe a request body by its media types, `_` for `/`."""
    content = {kind.replace("_", "/", 1).replace("_", "-"): {"schema": schema} for kind, schema in kinds.items()}
    return {"requestBody": {"required": True, "content": content}}


BINARY = {"type": "string", "format": "binary"}
NUMBERS = {"type": "array", "items": {"type": "number"}}
LABELS = {"type": "array", "items": {"type": ["string", "integer", "null"]}}
KNOWN = body(
    application_json={
        "type": "object",
        "properties": {
            "samples": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "labels": {**LABELS, "minItems": 1},
        },
        "required": ["samples", "labels"],
        "additionalProperties": False,
    },
)
SOURCES = [{"required": [field]} for field in ("prototypes", "classes", "sample")]
NEW_STREAM = body(application_json={**NewStream.model_json_schema(), "anyOf": SOURCES})
EMBEDDINGS = body(
    application_json={
        "type": "object",
        "properties": {
            "embeddings": {"type": "array", "items": NUMBERS},
            "known": {**LABELS, "description": "True classes that are known already, by name or number, or null."},
        },
        "required": ["embeddings"],
        "additionalProperties": False,
    },
    application_octet_stream=BINARY,
)
IMAGES = body(
    multipart_form_data={
        "type": "object",
        "properties": {"images": {"type": "array", "items": BINARY}},
        "required": ["images"],
    },
)
