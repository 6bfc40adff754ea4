"""The OpenAPI document is true: whatever is generated from it gets no 5xx, and answers are as the document says."""

import dataclasses

import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from moontide.serve.routes import router  # noqa: E402

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def operations():
    document = FastAPI()
    document.include_router(router)
    found = [each.ok() for each in schemathesis.openapi.from_dict(document.openapi()).get_all_operations()]
    return {each.label: each for each in found if not each.path.endswith("/events")}  # which is without end


OPERATIONS = operations()


@pytest.fixture(scope="module")
def client(shared_app):
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
    @given(st.one_of(valid, wrong), st.integers(0, 3))
    def check(case, stranger):
        if len(client.service.lines) >= 10:
            for name in list(client.service.lines):
                client.delete(f"/streams/{name}")
        if "stream" in case.path_parameters and stranger:  # most requests meet a stream that is there
            case.path_parameters["stream"] = "a"
            body = {"name": "a", "prototypes": np.eye(3).tolist(), "max_wait_ms": 0}
            assert client.post("/streams", json=body).status_code in (201, 409)
        case.call_and_validate(base_url=str(client.base_url), checks=CHECKS)

    check()
