"""Class names become vectors by the rule, and what is doubtful about them is reported and not changed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide.core.arrays import unit_rows
from moontide.encoders import prompts
from moontide.encoders.base import Encoder
from moontide.encoders.prompts import ENSEMBLE, embed_classes, find_templates, read_descriptions
from moontide.errors import FileError, InputError, OptionError, UnknownNameError


class Hashed(Encoder):
    """Gives every prompt a fixed random vector of any length, and equal words almost equal ones."""

    id, dim, logit_scale, preprocessing = "hashed", 8, 10.0, ""

    def prepare(self, image: Any) -> Any: ...
    def _images(self, batch: Sequence[Any]) -> Any: ...

    def _text(self, prompts: Sequence[str]) -> np.ndarray:
        words = ["couch" if word == "sofa" else word for word in prompts]
        return np.stack([np.random.default_rng(list(word.encode())).normal(size=8) * len(word) for word in words])


@given(st.lists(st.text(min_size=1, max_size=9).filter(lambda s: "{}" not in s), min_size=1, max_size=9, unique=True))
def test_a_class_is_the_unit_mean_of_its_unit_prompts(names: list[str]) -> None:
    templates = ["{}", "a {} there", "{} and {}"]
    found = embed_classes(Hashed(), names, templates)
    for name, row in zip(names, found.text, strict=True):
        prompts = Hashed()._text([name, f"a {name} there", f"{name} and {name}"])
        mean = (prompts / np.linalg.norm(prompts, axis=1, keepdims=True)).mean(axis=0)
        np.testing.assert_allclose(row, mean / np.linalg.norm(mean), atol=1e-5)
    assert found.names == tuple(names)
    assert found.templates == tuple(templates)


def test_names_are_reported_and_never_changed() -> None:
    found = embed_classes(Hashed(), ["sofa", "hot_dog", "couch", "cat", "cat"], ["{}"])
    assert found.names == ("sofa", "hot_dog", "couch", "cat", "cat")
    assert found.reports == [
        "class names have underscores, which the encoder does not read as spaces: hot_dog; write spaces",
        "class names appear more than once: cat; keep one of each: equal classes share their images",
        "class names are almost the same to the encoder (cosine above 0.98): sofa and couch; keep one, or say more",
    ]
    many = embed_classes(Hashed(), [f"a_{i}" for i in range(8)], ["{}"])
    assert many.reports[0].endswith("a_0, a_1, a_2, a_3, a_4 and 3 more; write spaces")
    assert not embed_classes(Hashed(), ["cat", "dog"]).reports


def test_descriptions_stand_for_templates_or_join_them(tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    file.write_text(json.dumps({"cat": ["it purrs", "it meows"], "dog": ["it barks"], "cow": ["it moos"]}))
    sentences = read_descriptions(file)
    alone = embed_classes(Hashed(), ["dog", "cat"], descriptions=sentences)
    np.testing.assert_allclose(alone.text[0], Hashed().encode_text(["it barks"])[0], atol=1e-6)
    both = embed_classes(Hashed(), ["dog", "cat"], ["{}"], sentences)
    mean = Hashed().encode_text(["dog", "it barks"]).mean(axis=0)
    np.testing.assert_allclose(both.text[0], mean / np.linalg.norm(mean), atol=1e-6)
    with pytest.raises(InputError, match="no sentence for the class 'bird'"):
        embed_classes(Hashed(), ["cat", "bird"], descriptions=sentences)
    with pytest.raises(InputError, match="at least one name"):
        embed_classes(Hashed(), [])


@pytest.mark.parametrize("text", ["[]", '{"cat": "it purrs"}', '{"cat": [1]}', '{"cat": [" "]}', "{"])
def test_a_broken_file_of_descriptions_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(FileError, match=r"d\.json (must|cannot)"):
        read_descriptions(tmp_path / "d.json")


def test_templates_by_name() -> None:
    assert find_templates(["eurosat"]) == ("a centered satellite photo of {}.",)
    assert find_templates(["ensemble", "a {}"]) == (*ENSEMBLE, "a {}")
    assert find_templates([]) == ()
    with pytest.raises(UnknownNameError, match=r"There is no template 'eurosatt'. Did you mean 'eurosat'"):
        find_templates(["eurosatt"])
    with pytest.raises(OptionError, match=r"must contain \{\} in place of the class name"):
        find_templates(["a photo of a cat"])


@pytest.mark.parametrize("mean", [0.5, 20])
def test_all_pairs_that_are_almost_the_same_are_found(mean: float) -> None:
    rng = np.random.default_rng(0)
    text = rng.normal(size=(3000, 96)) * np.geomspace(1, 0.1, 96) + mean
    text[1500:1800] = text[:300] + rng.normal(size=(300, 96)) * np.geomspace(0.001, 0.8, 300)[:, None]
    text = unit_rows(text)
    expected = np.argwhere(np.triu(text @ text.T > prompts.ALIKE, 1))
    found = sorted(prompts._alike(text))
    assert len(found) > 50
    np.testing.assert_array_equal(found, expected)


def test_doubts_about_many_names_take_no_product_of_all_pairs() -> None:
    rng = np.random.default_rng(0)
    text = unit_rows(rng.normal(size=(20_000, 1024)) * np.geomspace(1, 0.05, 1024)).astype(np.float32)
    names = [f"name {k}" for k in range(len(text))]
    start = time.process_time()
    _ = text[:1000] @ text.T
    full = len(text) / 1000 / 2 * (time.process_time() - start)  # for every pair once
    start = time.process_time()
    assert prompts._doubts(names, text) == []
    assert time.process_time() - start < full / 2
    text[:] = text[0]  # every pair is reported
    start = time.process_time()
    (report,) = prompts._doubts(names, text)
    assert time.process_time() - start < full / 2
    assert "name 0 and name 5 and others; keep one" in report
