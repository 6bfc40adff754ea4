import json
from pathlib import Path

import pytest
from PIL import Image

from moontide.errors import FileError, UnknownNameError
from moontide.report.paper import DATASETS
from moontide.store.datasets import dataset, dataset_names, read_dataset, read_folders
from moontide.store.toml import read_toml

PAPER = Path(__file__).parents[2] / "benchmarks" / "paper" / "datasets.toml"


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (3, 2), "red").save(path)


def layout(root, name):
    """Make a small folder as CoOp has it: two classes, three test images."""
    known = dataset(name)
    folder = root / known.folder
    names = ["red_fox", "tabby cat"]
    if known.layout == "split":
        rows = [["cars_test/1.jpg", 1, names[1]], ["b/2.jpg", 0, names[0]], ["3.jpg", 1, names[1]]]
        for path, _, _ in rows:
            picture(folder / known.images / path)
        split = {"train": [["unused.jpg", 0, names[0]]], "val": [], "test": rows}
        (folder / known.files[0]).write_text(json.dumps(split))
    elif known.layout == "imagenet":
        (folder / known.images).mkdir(parents=True)
        (folder / "classnames.txt").write_text("n02 red_fox\nn01 tabby cat\n\n")
        for path in ("n01/a.JPEG", "n02/b.JPEG", "n01/c.JPEG"):
            picture(folder / known.images / path)
    else:
        (folder / known.images).mkdir(parents=True)
        (folder / "variants.txt").write_text("red_fox\ntabby cat\n")
        (folder / "images_variant_test.txt").write_text("0012 tabby cat\n0034 red_fox\n0056 tabby cat\n")
        for number in ("0012", "0034", "0056"):
            picture(folder / known.images / f"{number}.jpg")
    return folder


def test_the_datasets_are_the_papers_with_the_published_templates():
    assert sorted(dataset_names()) == sorted(DATASETS)
    differ = {}
    for row in read_toml(PAPER)["row"]:
        known = dataset(row["dataset"])
        ours = (known.classes, known.samples, known.template)
        theirs = (row["classes"], row["samples"], row["template"])
        if ours != theirs:
            differ[known.name] = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
        assert known.title == row["name"]
        for name in (row["name"], row["other_name"]):
            assert dataset(name) == known
    assert differ == {  # the published program and split against what the paper prints
        "oxford_pets": [("a photo of a {}, a type of pet.", "a photo of {}, a type of pet.")],
        "dtd": [("{} texture", "{} texture.")],
        "caltech101": [(100, 101)],
    }


def test_no_two_datasets_share_a_name():
    names = [n for name in dataset_names() for n in (name, *dataset(name).aliases)]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() for name in names)
    with pytest.raises(UnknownNameError, match="Did you mean 'food101'"):
        dataset("fod101")


@pytest.mark.parametrize("name", DATASETS)
def test_the_layout_of_every_dataset_is_read(tmp_path, name):
    folder = layout(tmp_path, name)
    with pytest.warns(UserWarning, match="has 2 classes and 3 test images; .* of the paper has"):
        found = read_dataset(name, tmp_path)
    with pytest.warns(UserWarning, match="has 2 classes"):
        assert read_dataset(name, folder).paths == found.paths  # the folder itself will do
    assert found.class_names == ("red fox", "tabby cat")
    assert found.template == dataset(name).template
    assert len(found.paths) == 3
    assert sorted(found.labels.tolist()) == [0, 1, 1]
    for path in found.paths:
        with Image.open(path) as image:
            assert image.size == (3, 2)


def test_labels_and_paths_belong_together(tmp_path):
    layout(tmp_path, "imagenet")
    with pytest.warns(UserWarning, match="has 2 classes"):
        found = read_dataset("imagenet", tmp_path)
    assert [(p.parent.name, y) for p, y in zip(found.paths, found.labels, strict=True)] == [
        ("n02", 0),
        ("n01", 1),
        ("n01", 1),
    ]


@pytest.mark.parametrize("name", DATASETS)
def test_what_is_missing_is_named_with_the_layout_expected(tmp_path, name):
    known = dataset(name)
    with pytest.raises(FileError, match=f"{known.files[0]} is missing.*expected as .*{known.folder}/.*layout of CoOp"):
        read_dataset(name, tmp_path)
    folder = layout(tmp_path, name)
    pictures = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    if known.layout != "imagenet":
        pictures[0].unlink()
        with pytest.raises(FileError, match=r"\.jpg is missing"):
            read_dataset(name, tmp_path)
        pictures[1].unlink()
        with pytest.raises(FileError, match="and 1 more of 3 images are missing"):
            read_dataset(name, tmp_path)
    else:
        for path in pictures:
            path.unlink()
        (folder / known.images / "n02").rmdir()
        with pytest.raises(FileError, match="n02 is missing"):
            read_dataset(name, tmp_path)


def test_missing_images_folder_and_damaged_lists(tmp_path):
    folder = tmp_path / "dtd"
    folder.mkdir()
    (folder / "split_zhou_DescribableTextures.json").write_text("{}")
    with pytest.raises(FileError, match=r"dtd/images is missing"):
        read_dataset("dtd", tmp_path)
    (folder / "images").mkdir()
    with pytest.raises(
        FileError, match=r"split_zhou_DescribableTextures\.json is damaged or of another type \('test'\)"
    ):
        read_dataset("dtd", tmp_path)
    (folder / "split_zhou_DescribableTextures.json").write_text(json.dumps({"test": [["a.jpg", 5, "x"]]}))
    with pytest.raises(FileError, match="its test labels are not the numbers from 0 on"):
        read_dataset("dtd", tmp_path)


def test_a_folder_of_folders(tmp_path):
    for name in ("zebra/1.png", "zebra/2.JPG", "red_fox/1.jpeg", "red_fox/.hidden.jpg", ".cache/1.jpg"):
        picture(tmp_path / name)
    (tmp_path / "red_fox" / "notes.txt").write_text("no image")
    found = read_folders(tmp_path)
    assert found.class_names == ("red fox", "zebra")
    assert [(p.name, y) for p, y in zip(found.paths, found.labels, strict=True)] == [
        ("1.jpeg", 0),
        ("1.png", 1),
        ("2.JPG", 1),
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match=r"one folder of images for each class .* none in 'empty'"):
        read_folders(tmp_path)
    with pytest.raises(FileError, match="It has no folders"):
        read_folders(tmp_path / "empty")
