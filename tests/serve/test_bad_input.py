"""What strangers may send, one by one: a clear 4xx that says what is wrong, and a state that is as before."""

import gzip
import io
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load

from moontide.serve import images

D, CASES = 8, {}
GOOD = np.ones((2, D), "<f4")
RAW = {"Content-Type": "application/octet-stream", "X-Shape": "2,8"}
JSON = {"Content-Type": "application/json"}


def case(status, *words):
    """Register a function (client) that sends something bad and returns the answer."""

    def register(send):
        CASES[send.__name__.replace("_", " ")] = (status, words, send)
        return send

    return register


def embeddings(client, content, headers=RAW, stream="a"):
    return client.post(f"/streams/{stream}/embeddings", content=content, headers=headers)


def values(client, rows):
    return client.post("/streams/a/embeddings", json={"embeddings": rows})


def pictures(client, *contents, name="images", filename="a.jpg"):
    return client.post("/streams/a/images", files=[(name, (filename, content, "image/jpeg")) for content in contents])


def picture(kind="PNG", size=(4, 4), **options):
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, kind, **options)
    return buffer.getvalue()


def create(client, **body):
    return client.post("/streams", json={"prototypes": np.eye(3, D).tolist(), **body})


# Bodies


@case(400, "not JSON")
def broken_json(client):
    return embeddings(client, b'{"embeddings": [[1, 2', JSON)


@case(400, "not JSON")
def json_that_is_not_utf8(client):
    return embeddings(client, b'{"embeddings": "\xff\xfe"}', JSON)


@case(422, "half of a surrogate pair")
def half_of_a_character_in_a_template(client):
    return client.post("/streams", content=b'{"classes": ["cat"], "template": "{}\\ud83d"}', headers=JSON)


@case(422, "half of a surrogate pair")
def half_of_a_character_as_it_is(client):
    return client.post("/streams", content=b'{"classes": ["cat"], "template": "{}\xed\xa0\xbd"}', headers=JSON)


@case(422, "unicode string")
def half_of_a_character_as_a_field(client):
    return client.post("/streams/a/restore", content=b'{"\\ud83d": 1}', headers=JSON)


@case(400, "not JSON")
def json_nested_too_deep(client):
    return embeddings(client, b"[" * 50_000, JSON)


@case(422, "JSON object with some of the fields embeddings, known")
def json_of_another_shape(client):
    return embeddings(client, b"[1, 2]", JSON)


@case(422, "'label': Extra inputs", "known are embeddings, known")
def json_with_more_than_is_known(client):
    return client.post("/streams/a/embeddings", json={"embeddings": [[1] * D], "label": 1})


@case(422, "must be a 2-D array", "(0,)")
def no_rows(client):
    return values(client, [])


@case(422, "must be a 2-D array", "1-D")
def one_row_without_brackets(client):
    return values(client, [1.0] * D)


@case(422, "differ in length")
def ragged_rows(client):
    return values(client, [[1.0] * D, [1.0]])


@case(422, "real numbers")
def words_for_numbers(client):
    return values(client, [["one"] * D])


@case(422, "real numbers")
def truth_for_numbers(client):
    return values(client, [[True] * D])


@case(422, "real numbers", "true or false")
def one_truth_among_numbers(client):
    return values(client, [[1.0] * (D - 1) + [True]])


@case(422, "real numbers")
def nothing_for_numbers(client):
    return values(client, [[None] * D])


@case(422, "real numbers")
def numbers_too_long_for_any_type(client):
    return values(client, [[10**400] * D])


@case(422, "dimension of the stream, 8", "Got 7")
def wrong_dimension_in_json(client):
    return values(client, [[1.0] * 7])


@case(422, "dimension of the stream, 8", "Got 4")
def wrong_dimension_in_raw(client):
    return embeddings(client, GOOD.tobytes(), {**RAW, "X-Shape": "4,4"})


@case(422, "must be finite", "row 1")
def nan_in_raw(client):
    x = GOOD.copy()
    x[1, 3] = np.nan
    return embeddings(client, x.tobytes())


@case(422, "must be finite", "row 0")
def infinity_in_raw(client):
    x = GOOD.copy()
    x[0, 0] = np.inf
    return embeddings(client, x.tobytes())


@case(422, "must be finite")
def nan_in_json(client):
    return embeddings(client, b'{"embeddings": [[NaN, 1, 1, 1, 1, 1, 1, 1]]}', JSON)


@case(422, "must be finite")
def numbers_beyond_float32(client):
    return values(client, [[1e300] * D])


@case(422, "all-zero rows", "row 1")
def a_row_of_zeros(client):
    return embeddings(client, np.eye(2, D, dtype="<f4")[[0, 0]].tobytes()[: 4 * D] + bytes(4 * D))


@case(422, "64 bytes", "Got 128", "dtype")
def float64_called_float32(client):
    return embeddings(client, GOOD.astype("<f8").tobytes())


@case(422, "64 bytes", "Got 32", "dtype")
def float16_called_float32(client):
    return embeddings(client, GOOD.astype("<f2").tobytes())


@case(422, "X-Shape")
def raw_without_a_shape(client):
    return embeddings(client, GOOD.tobytes(), {"Content-Type": "application/octet-stream"})


@case(422, "X-Shape")
def a_shape_that_is_none(client):
    return embeddings(client, GOOD.tobytes(), {**RAW, "X-Shape": "2x8"})


@case(422, "must not be empty")
def an_empty_shape(client):
    return embeddings(client, b"", {**RAW, "X-Shape": "0,8"})


@case(415, "application/json or application/octet-stream", "text/plain")
def another_content_type(client):
    return embeddings(client, b"1 2 3", {"Content-Type": "text/plain"})


@case(415, "application/json")
def a_pickle(client):
    return embeddings(client, b"\x80\x04.", {"Content-Type": "application/x-pickle"})


@case(413, "200000 bytes")
def a_huge_body(client):
    return embeddings(client, bytes(300_000), {**RAW, "X-Shape": "9375,8"})


@case(413, "200000 bytes", "or more")
def a_huge_body_of_unknown_length(client):
    return embeddings(client, (bytes(10_000) for _ in range(1000)))


@case(413, "4096 samples", "Got 5000")
def too_many_samples(client):
    return embeddings(client, np.ones((5000, D), "<f4").tobytes(), {**RAW, "X-Shape": "5000,8"})


@case(422, "Idempotency-Key")
def a_key_with_spaces(client):
    return embeddings(client, GOOD.tobytes(), {**RAW, "Idempotency-Key": "a b"})


@case(422, "Idempotency-Key")
def a_key_too_long(client):
    return embeddings(client, GOOD.tobytes(), {**RAW, "Idempotency-Key": "a" * 129})


@case(404, "no stream 'b'")
def a_stream_that_is_not_there(client):
    return embeddings(client, GOOD.tobytes(), stream="b")


@case(404)
def a_path_for_a_name(client):
    return embeddings(client, GOOD.tobytes(), stream="..%2F..%2Fetc%2Fpasswd")


# Images


@case(415, "multipart/form-data")
def an_image_without_a_form(client):
    return client.post("/streams/a/images", content=picture(), headers={"Content-Type": "image/png"})


@case(422, "at least one image")
def a_form_without_images(client):
    return client.post(
        "/streams/a/images", content=b"--x--\r\n", headers={"Content-Type": "multipart/form-data; boundary=x"}
    )


@case(400)
def a_form_without_a_boundary(client):
    return client.post("/streams/a/images", content=b"--x--", headers={"Content-Type": "multipart/form-data"})


@case(422, "parts 'images' and nothing else")
def a_form_with_other_parts(client):
    return pictures(client, picture(), name="file")


@case(422, "parts 'images' and nothing else")
def a_path_for_an_image(client):
    return client.post("/streams/a/images", files={"images": (None, "/etc/passwd")})


@case(415, "Image 1 must be a JPEG, PNG or WebP")
def a_text_called_jpeg(client):
    return pictures(client, picture(), b"#!/bin/sh")


@case(415, "Image 0")
def an_svg(client):
    return pictures(client, b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>', filename="a.svg")


@case(422, "Image 0 cannot be decoded")
def half_an_image(client):
    whole = picture("JPEG", (64, 64))
    return pictures(client, whole[: len(whole) // 2])


@case(422, "Image 0 cannot be decoded")
def only_the_first_bytes_of_an_image(client):
    return pictures(client, b"\x89PNG\r\n\x1a\n" + bytes(100))


def bomb(side):
    """Make a PNG of many pixels in few bytes, as its header says."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100_000))) + chunk(b"IEND", b"")


@case(413, "Image 0 has more than 50000000 pixels")
def an_image_of_too_many_pixels(client):
    return pictures(client, bomb(8000))


@case(413, "Image 1 has more than 50000000 pixels")
def a_large_decompression_bomb(client):
    return pictures(client, picture(), bomb(10_000))


@case(413, "Image 0 has more than 50000000 pixels")
def a_huge_decompression_bomb(client):
    return pictures(client, bomb(60_000))


@case(413, "bytes")
def an_image_file_that_is_too_large(client):
    return pictures(client, picture() + bytes(60_000))


@case(400, "Too many files")
def too_many_images(client):
    return pictures(client, *[picture()] * 65)


# Streams


@case(422, "'classes' or 'prototypes'")
def a_stream_of_nothing(client):
    return client.post("/streams", json={})


@case(422, "no method 'mooon'", "Did you mean 'moon'?")
def an_unknown_method(client):
    return create(client, method="mooon")


@case(422, "no option of moon 'betta'", "Did you mean 'beta'?")
def an_unknown_option(client):
    return create(client, method="moon", options={"betta": "soft"})


@case(422, "'iterations' option of moon must be an integer of at least 1", "Got 0")
def an_option_out_of_range(client):
    return create(client, method="moon", options={"iterations": 0})


@case(422, "needs views")
def a_method_that_needs_more(client):
    return create(client, method="mta")


@case(422, "no preset of moon")
def an_unknown_preset(client):
    return create(client, method="moon", preset="best")


@case(422, "name")
def a_name_with_a_path(client):
    return create(client, name="../a")


@case(409, "The stream 'a' exists already")
def a_name_that_is_taken(client):
    return create(client, name="a")


@case(422, "one name for each of 3 prototypes", "Got 2")
def too_few_class_names(client):
    return create(client, classes=["a", "b"])


@case(422, "distinct names", "'b'")
def the_same_class_twice(client):
    return create(client, classes=["a", "b", "b"])


@case(422, "printable")
def a_class_name_of_control_characters(client):
    return create(client, classes=["a", "b", "c\x00"])


@case(422)
def a_class_name_that_is_no_text(client):
    return client.post("/streams", content=b'{"prototypes": [[1]], "classes": ["\\ud800"]}', headers=JSON)


@case(422, "prototypes", "finite")
def prototypes_with_nan(client):
    return client.post("/streams", content=b'{"prototypes": [[1, NaN], [1, 2]]}', headers=JSON)


@case(422, "'prototypes' must not have all-zero rows")
def prototypes_of_zeros(client):
    return create(client, prototypes=[[1, 0], [0, 0]])


@case(422, "differ in length")
def ragged_prototypes(client):
    return create(client, prototypes=[[1, 2], [1]])


@case(422, "prototypes")
def prototypes_of_words(client):
    return create(client, prototypes=[["a", "b"]])


@case(422, "logit_scale")
def a_negative_logit_scale(client):
    return create(client, logit_scale=-1)


@case(422, "max_batch")
def batches_of_nothing(client):
    return create(client, max_batch=0)


@case(422, "colour", "Extra inputs are not permitted")
def an_unknown_field(client):
    return create(client, colour="red")


@case(400, "not JSON")
def a_stream_in_broken_json(client):
    return client.post("/streams", content=b"{", headers=JSON)


@case(422, "'sample' has its own classes")
def a_sample_set_with_prototypes(client):
    return create(client, sample="simulated")


@case(422, "snapshot")
def a_snapshot_that_is_no_number(client):
    return client.post("/streams/a/restore", json={"snapshot": "first"})


@case(422, "first")
def a_negative_sample_number(client):
    return client.get("/streams/a/predictions", params={"first": -1})


@case(422, "size")
def too_many_predictions(client):
    return client.get("/streams/a/predictions", params={"size": 10**6})


@case(415, "compressed", "Content-Encoding: gzip")
def a_compressed_body(client):
    return embeddings(client, gzip.compress(GOOD.tobytes()), {**RAW, "Content-Encoding": "gzip"})


@case(422, "'template' needs 'classes'")
def a_template_without_class_names(client):
    return client.post("/streams", json={"prototypes": np.eye(3).tolist(), "template": "a photo of a {}"})


@case(405)
def another_verb(client):
    return client.put("/streams/a/embeddings", content=GOOD.tobytes(), headers=RAW)


@pytest.fixture(scope="module")
def client(shared_app):
    body = {"name": "a", "prototypes": np.eye(3, D).tolist(), "method": "tda", "max_wait_ms": 0}
    assert shared_app.post("/streams", json=body).status_code == 201
    assert embeddings(shared_app, GOOD.tobytes()).status_code == 200
    return shared_app


def picture_of(client):
    """Return all that a stream is."""
    answered = client.get("/streams/a").json()
    state = {name: value.tobytes() for name, value in load(client.get("/streams/a/state").content).items()}
    return answered, state, [each["name"] for each in client.get("/streams").json()]


@pytest.mark.parametrize("name", CASES)
def test_bad_input(client, name, monkeypatch):
    monkeypatch.setattr(images, "MAX_BYTES", 50_000)
    status, words, send = CASES[name]
    before = picture_of(client)
    answer = send(client)
    assert answer.status_code == status, answer.text
    detail = answer.json()["detail"]
    assert isinstance(detail, str)
    assert len(detail) < 700
    for word in words:
        assert word in detail
    assert picture_of(client) == before


def test_a_good_push_in_a_bad_crowd(client):
    """A bad push fails alone, also where it would be in one micro-batch with good ones."""
    before = client.get("/streams/a").json()["total"]
    assert values(client, [[float("1")] * D]).status_code == 200
    assert client.get("/streams/a").json()["total"] == before + 1
    assert values(client, [[1.0] * 7]).status_code == 422
    assert client.get("/streams/a").json()["total"] == before + 1


def test_bodies_in_flight_are_counted_and_given_back(client):
    deadline = time.monotonic() + 5
    while client.service.gate.bodies and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.service.gate.bodies == 0
    client.service.gate.max_bodies = 100
    try:
        busy = embeddings(client, GOOD.tobytes() * 4, {**RAW, "X-Shape": "8,8"})
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
        assert embeddings(client, GOOD.tobytes()).status_code == 200
    finally:
        client.service.gate.max_bodies = 2**28
