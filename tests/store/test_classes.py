"""Class names as people have them: what is read, what is refused, and what becomes of synonyms and trees."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moontide.encoders.base import Encoder
from moontide.encoders.prompts import embed_classes
from moontide.errors import FileError, InputError, MoontideError
from moontide.store.classes import ClassList, read_classes
from moontide.store.files import read_task


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "# animals\n\ncat\n  dog  # of all breeds\n"),
        ("a.json", '["cat", "dog"]'),
        ("b.json", '{"cat": [], "dog": ["puppy"]}'),
        ("c.json", '[{"name": "cat"}, {"name": "dog"}]'),
        ("a.csv", "id,name\n1,cat\n2,dog\n"),
        ("b.csv", "\ufeffClass,Share\ncat,0.1\ndog,0.9\n"),
        ("a.tsv", "label\tid\ncat\t1\ndog\t2\n"),
        ("noend", "cat\ndog"),
    ],
)
def test_every_usual_file_gives_its_names(tmp_path: Path, name: str, text: str) -> None:
    assert read_classes(write(tmp_path, name, text)).names == ("cat", "dog")


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.json", "3", "list of names"),
        ("a.json", "{", "cannot be read"),
        ("a.json", '{"cat": 1}', "texts for the class 'cat'"),
        ("a.json", '{"cat": [], "cat": []}', "more than one entry for 'cat'"),
        ("a.json", '["cat", 3]', "list of names"),
        ("a.json", '["cat", "d\\ud800g"]', "no prompt or table can hold"),
        ("a.json", '{"cat": ["kitty\\u0000"]}', "no prompt or table can hold"),
        ("a.csv", "cat\ndog\n", "must have a column of names"),
        ("a.csv", "name\ncat,dog\n", "more values than its header"),
        ("a.txt", "cat, dog\n", "one line with commas"),
        ("a.txt", '["cat"]', "looks like JSON"),
        ("a.txt", "# nothing\n\n", "no class names"),
        ("a.npy", "cat", "must be a comma-separated list"),
        ("a.csv", "name,parent\na,b\nb,a\n", "above itself"),
    ],
)
def test_what_is_no_list_of_names_is_refused_in_a_sentence(tmp_path: Path, name: str, text: str, part: str) -> None:
    with pytest.raises(MoontideError, match=part) as caught:
        read_classes(write(tmp_path, name, text))
    assert len(str(caught.value)) <= 300


def test_names_without_commas_are_answered_with_a_hint_at_commas() -> None:
    with pytest.raises(FileError, match='separate them with commas: "dress, hat"'):
        read_classes("dress hat")


def test_synonyms_and_descriptions_come_from_json_and_from_tables(tmp_path: Path) -> None:
    sentence = "a small furry animal that purrs"
    first = read_classes(write(tmp_path, "a.json", json.dumps({"cat": ["kitty", sentence], "dog": "puppy"})))
    table = f"name,synonyms,description\ncat,kitty,{sentence}\ndog,puppy,\n"
    second = read_classes(write(tmp_path, "a.csv", table))
    assert first == second == ClassList(("cat", "dog"), {"cat": ["kitty"], "dog": ["puppy"]}, {"cat": [sentence]})


def test_rows_of_one_name_are_one_class_with_several_prompts(tmp_path: Path) -> None:
    found = read_classes(write(tmp_path, "a.csv", "name,prompt\ncat,a cat\ncat,my cat\ndog,a dog\n"))
    assert found.names == ("cat", "dog")
    assert found.descriptions["cat"] == ["a cat", "my cat"]


def test_a_synonym_of_two_classes_is_named() -> None:
    classes = ClassList(("cat", "dog"), {"cat": ["pet"], "dog": ["Pet"]})
    assert classes.doubts() == ["synonyms stand for more than one class: pet (cat and dog); keep each with one"]


def test_paths_are_a_tree_only_where_some_begin_alike(tmp_path: Path) -> None:
    tree = read_classes("animal/dog/beagle, animal/cat, T-shirt/top")
    assert tree.names == ("beagle", "cat", "T-shirt/top")
    assert tree.paths == (("animal", "dog", "beagle"), ("animal", "cat"), ("T-shirt/top",))
    assert read_classes("T-shirt/top, pants").paths is None
    table = "name\tparent\nbeagle\tdog\ndog\tanimal\ncat\tanimal\n"
    assert read_classes(write(tmp_path, "a.tsv", table)).paths == (
        ("animal", "dog", "beagle"),
        ("animal", "dog"),
        ("animal", "cat"),
    )


class Letters(Encoder):
    """Counts letters."""

    id, dim, logit_scale, preprocessing = "letters", 26, 10.0, ""

    def prepare(self, image: object) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def _images(self, batch: object) -> np.ndarray:
        raise NotImplementedError

    def _text(self, prompts: object) -> np.ndarray:
        return np.asarray([[str(p).count(chr(97 + i)) for i in range(26)] for p in prompts], dtype=np.float32)  # type: ignore[attr-defined]


def test_the_vector_of_a_class_is_the_mean_of_the_vectors_of_its_prompts() -> None:
    classes = ClassList(("cat", "dog"), {"cat": ["kitty"]}, {"cat": ["an animal"]})
    found = embed_classes(Letters(), classes, ["{}"]).text[0]
    rows = Letters().encode_text(["cat", "kitty", "an animal"])
    mean = rows.mean(axis=0)
    np.testing.assert_allclose(found, mean / np.linalg.norm(mean), atol=1e-6)


def test_embeddings_of_prompts_become_means_by_class(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows, images = rng.normal(size=(4, 8)), rng.normal(size=(6, 8))
    names = write(tmp_path, "names.json", '{"cat": ["kitty", "an animal that purrs and sleeps"], "dog": []}')
    np.savez(tmp_path / "a.npz", image_features=images, text_features=rows)
    task = read_task(tmp_path / "a.npz", classes=names).task
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    mean = unit[:3].mean(axis=0)
    np.testing.assert_allclose(task.text, [mean / np.linalg.norm(mean), unit[3]], atol=1e-6)
    assert task.class_names == ("cat", "dog")
    np.savez(tmp_path / "b.npz", image_features=images, text_features=rows[:2])  # one row per class
    np.testing.assert_allclose(read_task(tmp_path / "b.npz", classes=names).task.text, unit[:2], atol=1e-6)
    np.savez(tmp_path / "c.npz", image_features=images, text_features=rows[:3])
    with pytest.raises(InputError, match="2 classes, or for each of their 4 names, synonyms and descriptions"):
        read_task(tmp_path / "c.npz", classes=names)


def test_embeddings_of_the_lines_of_a_table_become_means_by_class(tmp_path: Path) -> None:
    table = "name,prompt\ncat,a cat\ndog,a dog\ncat,a kitty\n"
    classes = read_classes(write(tmp_path, "names.csv", table))
    assert classes.lines == (0, 1, 0)
    np.testing.assert_allclose(classes.means(np.eye(3)), [[0.5**0.5, 0, 0.5**0.5], [0, 1, 0]])
