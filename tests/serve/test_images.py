"""Images and class names, where the server has an encoder."""

import io

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load

from moontide.errors import FileError
from moontide.serve.images import list_images
from moontide.store.classes import read_classes


def picture(colour="red", kind="PNG", size=(8, 6), **options):
    buffer = io.BytesIO()
    mode = options.pop("mode", "RGB")
    Image.new(mode, size, colour).save(buffer, kind, **options)
    return buffer.getvalue()


def send(client, *pictures, key=None):
    headers = {} if key is None else {"Idempotency-Key": key}
    files = [("images", (f"../../{i}.exe", content)) for i, content in enumerate(pictures)]  # names do not matter
    return client.post("/streams/a/images", files=files, headers=headers)


@pytest.fixture
def client(app, sqlite, colour):
    client = app(sqlite, encoder=colour)
    made = client.post("/streams", json={"name": "a", "classes": ["red", "green", "blue"], "max_wait_ms": 0})
    assert made.status_code == 201, made.text
    assert (made.json()["source"], made.json()["logit_scale"]) == ("colour", 20.0)
    return client


def test_images_of_every_kind_are_labelled(client):
    answer = send(
        client, picture("blue"), picture("red", "JPEG"), picture("green", "WEBP", lossless=True),
        picture((255, 0, 0, 255), mode="RGBA"), picture((0, 255, 255, 0), "JPEG", mode="CMYK"),
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert answer.json()["class_names"] == ["blue", "red", "green", "red", "red"]


def test_images_and_embeddings_of_one_stream(client, colour):
    image = Image.new("RGB", (3, 3), "red")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    x = colour.encode_images([image])
    by_image = send(client, buffer.getvalue()).json()
    by_embedding = client.post("/streams/a/embeddings", json={"embeddings": x.tolist()}).json()
    assert by_image["zero_shot_confidence"] == by_embedding["zero_shot_confidence"]
    assert by_embedding["first"] == 1


def test_a_repeated_push_of_images_is_not_counted_twice(client):
    first = send(client, picture("red"), picture("blue"), key="one")
    again = send(client, picture("red"), picture("blue"), key="one")
    assert first.content == again.content
    assert again.headers["idempotency-replayed"] == "true"
    assert send(client, picture("blue"), picture("red"), key="one").status_code == 422
    assert client.get("/streams/a").json()["total"] == 2


def test_a_template_of_ones_own(client):
    """The encoder finds the first colour in a prompt: with this template always red."""
    made = client.post("/streams", json={"name": "b", "classes": ["red", "blue"], "template": "a red {}"})
    assert made.status_code == 201
    text = load(client.get("/streams/b/state").content)["text"]
    np.testing.assert_array_equal(text[0], text[1])


def test_the_default_stream_is_made_once(app, sqlite, colour):
    client = app(sqlite, encoder=colour, classes=["red", "green"])
    assert client.get("/streams/default").json()["class_names"] == ["red", "green"]
    assert [each["name"] for each in client.get("/streams").json()] == ["default"]


def test_a_class_is_the_mean_of_its_synonyms(app, sqlite, colour, tmp_path):
    (tmp_path / "names.json").write_text('{"warm": ["red", "green"], "cold": "blue"}')
    client = app(sqlite, encoder=colour, classes=read_classes(str(tmp_path / "names.json")))
    made = {"name": "a", "classes": ["warm", "cold"], "synonyms": {"warm": ["red", "green"], "cold": ["blue"]}}
    assert client.post("/streams", json=made).status_code == 201
    texts = [load(client.get(f"/streams/{name}/state").content)["text"] for name in ("default", "a")]
    np.testing.assert_array_equal(*texts)
    names = colour.encode_text(["warm", "red", "green"])
    mean = names.mean(axis=0)
    np.testing.assert_allclose(texts[0][0], mean / np.linalg.norm(mean), atol=1e-6)
    for strange in ({**made, "synonyms": {"dog": []}}, {**made, "prototypes": [[1, 0], [0, 1]]}):
        assert client.post("/streams", json={**strange, "name": "b"}).status_code == 422


def test_an_encoder_of_another_dimension_takes_no_images(client, text):
    client.delete("/streams/a")
    client.post("/streams", json={"name": "a", "prototypes": np.eye(3, 5).tolist()})
    answer = send(client, picture())
    assert (answer.status_code, "dimension" in answer.json()["detail"]) == (422, True)


def test_without_an_encoder_there_are_no_images(app, sqlite, text):
    client = app(sqlite)
    client.post("/streams", json={"name": "a", "prototypes": text.tolist()})
    for answer in (send(client, picture()), client.post("/streams", json={"classes": ["red"]})):
        assert answer.status_code == 422
        assert "--encoder" in answer.json()["detail"]


def test_the_operators_sample_images(app, sqlite, colour, tmp_path):
    for name, kind in (("red/b.png", "PNG"), ("blue/a.jpg", "JPEG")):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(picture(path.parent.name, kind))
    client = app(sqlite, encoder=colour, samples=list_images(tmp_path / "images"))
    assert client.get("/server").json()["sample_images"] == 2
    first = client.get("/samples/images/0")
    assert (first.headers["x-label"], first.headers["content-type"]) == ("blue", "image/jpeg")
    assert first.content == (tmp_path / "images/blue/a.jpg").read_bytes()
    assert client.get("/samples/images/2").status_code == 404
    assert client.get("/samples/images/..").status_code in (404, 422)
    with pytest.raises(FileError, match="has no"):
        list_images(tmp_path / "data")


def test_a_template_without_a_place_for_the_name_is_refused(client):
    for template in ("a photo", "", "a photo of {", "{ }"):
        made = client.post("/streams", json={"classes": ["red", "blue"], "template": template})
        assert made.status_code == 422
        assert "must contain {} in place of the class name" in made.json()["detail"]
    assert client.post("/streams", json={"classes": ["red", "blue"], "template": "{}"}).status_code == 201
    assert len(client.get("/streams").json()) == 2


def test_errors_of_images_name_no_object_in_memory(client):
    whole = picture("red", "PNG", (64, 64))
    for damaged in (whole[:40], whole[:20], whole[:8] + b"rubbish" * 9, picture("red", "JPEG")[:30], whole[:-30]):
        answer = send(client, whole, damaged)
        assert answer.status_code in (415, 422)
        assert answer.json()["detail"].startswith("Image 1 ")
        assert " at 0x" not in answer.json()["detail"]
