"""The OpenAPI document is true: whatever is generated from it gets no 5xx, and answers are as the document says."""

import dataclasses
import io

import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from schemathesis import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import negative_data_rejection  # noqa: E402

from moontide.serve.app import document  # noqa: E402
from moontide.serve.routes import router  # noqa: E402


def operations():
    described = FastAPI()
    described.include_router(router)
    found = [each.ok() for each in schemathesis.openapi.from_dict(document(described)).get_all_operations()]
    return {each.label: each for each in found if not each.path.endswith("/events")}  # which is without end


OPERATIONS = operations()


def picture():
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2), "red").save(buffer, "PNG")
    return buffer.getvalue()


def rows(draw, n, d):
    return draw(arrays(np.float32, (n, d), elements=st.floats(0.5, 2, width=32))).tolist()


# What JSON Schema cannot say: rows have one length, that of the stream; samples are there; images are images. These
# make good requests of that kind, with the other fields as they were generated.
GOOD = {
    "POST /streams": lambda draw, body: {
        **{key: body[key] for key in ("name", "logit_scale", "max_batch", "max_wait_ms", "window") if key in body},
        "prototypes": rows(draw, 3, draw(st.integers(1, 9))),
    },
    "POST /streams/{stream}/embeddings": lambda draw, body: {"embeddings": rows(draw, draw(st.integers(1, 9)), 8)},
    "POST /streams/{stream}/known": lambda draw, body: {"samples": [0], "labels": [draw(st.integers(0, 2))]},
    "POST /streams/{stream}/images": lambda draw, body: {"images": [picture()]},
}


@pytest.fixture(scope="module")
def client(shared_app, learner_of_module):
    shared_app.service.limits = dataclasses.replace(shared_app.service.limits, max_streams=10)
    return shared_app


def test_every_path_is_documented(client):
    document = client.get("/openapi.json").json()
    assert len(OPERATIONS) >= 20
    assert {f"{verb.upper()} {path}" for path, verbs in document["paths"].items() for verb in verbs} == {
        *OPERATIONS, "GET /streams/{stream}/events"
    }  # fmt: skip


@pytest.mark.parametrize("label", OPERATIONS)
def test_no_request_breaks_the_server(client, label):
    valid, wrong = (OPERATIONS[label].as_strategy(generation_mode=mode) for mode in GenerationMode)

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.one_of(valid, wrong), st.integers(0, 3), st.data())
    def check(case, stranger, data):
        for name in list(client.service.queues) if len(client.service.queues) >= 8 else ():
            client.delete(f"/streams/{name}")
        if "stream" in case.path_parameters and stranger:  # most requests meet a stream that is there
            case.path_parameters["stream"] = "a"
            body = {"name": "a", "prototypes": np.eye(3, 8).tolist(), "method": "learner"}
            if client.post("/streams", json=body).status_code == 201:
                client.post("/streams/a/embeddings", json={"embeddings": np.eye(3, 8).tolist()})
        if label in GOOD and case.meta.generation.mode is GenerationMode.POSITIVE:
            case.body = GOOD[label](data.draw, case.body if isinstance(case.body, dict) else {})
            case.media_type = "multipart/form-data" if "images" in label else "application/json"
            case.headers.pop("Idempotency-Key", None)  # under which other samples may have come
        # bytes are no JSON string, so that a good image would count as a bad request that was taken
        excluded = [negative_data_rejection] if "images" in label else []
        case.call_and_validate(base_url=str(client.base_url), excluded_checks=excluded)

    check()
