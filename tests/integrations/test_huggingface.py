"""Hugging Face datasets in and out, with the real package."""

import numpy as np
import pytest
from PIL import Image

from moontide import TIDE
from moontide.encoders import Encoder
from moontide.errors import InputError
from moontide.integrations import Labels, huggingface
from moontide.simulate import simulate

datasets = pytest.importorskip("datasets", reason="the extra 'datasets' is not installed")


class Colour(Encoder):
    """The mean colour of an image, and the colours that names mean."""

    id, dim, logit_scale, preprocessing = "colour", 3, 10.0, "mean colour"

    def prepare(self, image):
        return {"mean": np.asarray(image.resize((1, 1)), dtype=np.float32).reshape(3)}

    def _images(self, batch):
        return np.stack([one["mean"] for one in batch]) + 1

    def _text(self, prompts):
        return np.eye(3)[[["red", "green", "blue"].index(prompt) for prompt in prompts]]


def test_images_of_a_dataset_get_labels_as_columns():
    colours = ["red", "blue", "green", "blue"] * 20  # more than one batch
    pictures = [Image.new("RGB", (8, 8), colour) for colour in colours]
    dataset = datasets.Dataset.from_dict({"image": pictures, "true": colours}).cast_column("image", datasets.Image())
    encoder, names = Colour(), ["red", "green", "blue"]
    features = huggingface.embed_images(dataset, encoder)
    result = TIDE().fit_predict(features, encoder.encode_text(names), logit_scale=encoder.logit_scale)
    labelled = huggingface.add_labels(dataset, result, names)
    assert labelled.column_names == ["image", "true", "label", "confidence", "unknown"]
    kind = labelled.features["label"]
    assert [kind.int2str(k) for k in labelled["label"]] == colours
    np.testing.assert_allclose(labelled["confidence"], result.confidence, atol=1e-6)


def test_a_column_that_is_there_is_not_replaced():
    data = simulate(10, 3, dim=8)
    result = TIDE().fit_predict(data.features, data.text)
    dataset = datasets.Dataset.from_dict({"label": [0] * 10, "embedding": data.features.tolist()})
    np.testing.assert_allclose(huggingface.vectors(dataset), data.features, rtol=1e-6)
    with pytest.raises(InputError, match="prefix"):
        huggingface.add_labels(dataset, result, ["a", "b", "c"])
    labelled = huggingface.add_labels(dataset, result, ["a", "b", "c"], prefix="tide_")
    assert labelled["tide_label"][:] == list(result.labels)
    with pytest.raises(InputError, match="10 rows"):
        huggingface.add_labels(dataset.select(range(3)), result, ["a", "b", "c"], "tide_")
    with pytest.raises(InputError, match="no column 'image'"):
        huggingface.embed_images(dataset, Colour())
    with pytest.raises(InputError, match="one length"):
        huggingface.vectors(datasets.Dataset.from_dict({"embedding": [[1.0], [1.0, 2.0]]}))


def test_a_folder_is_loaded_again(tmp_path, capfd):
    data = simulate(10, 3, dim=8)
    result = TIDE().fit_predict(data.features, data.text)
    labels = Labels.of_result(result, [f"{i}.jpg" for i in range(10)], ["a", "b", "c"], data.features)
    huggingface.write_dataset(labels, tmp_path / "labels")
    assert capfd.readouterr().err == ""  # no bars
    assert not datasets.are_progress_bars_disabled()
    read = datasets.load_from_disk(str(tmp_path / "labels"))
    assert read["id"][:] == labels.ids
    assert [read.features["label"].int2str(k) for k in read["label"]] == labels.labels
    np.testing.assert_allclose(huggingface.vectors(read), data.features, rtol=1e-6)
