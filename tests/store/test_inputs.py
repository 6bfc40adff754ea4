"""Known labels, class balance, negatives and groups from files: every kind, and a sentence for what does not fit."""

import csv
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide.encoders.places import ImageFile
from moontide.encoders.sources import list_images, other_names
from moontide.errors import FileError, MoontideError
from moontide.store.inputs import read_class_prior, read_groups, read_known, read_negatives

IDS = ["in/a.jpg", "in/b.jpg", "in/c.jpg"]
NAMES = ["cat", "dog", "7"]


@pytest.fixture
def write(tmp_path):
    def to(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return to


@given(data=st.data(), n=st.integers(1, 12), k=st.integers(1, 5))
def test_labels_that_a_table_says_come_back(tmp_path_factory, data, n, k):
    text = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=8)
    ids = data.draw(st.lists(text, min_size=n, max_size=n, unique=True))
    names = data.draw(st.lists(text.filter(lambda s: s.strip() not in ("", "-1")), min_size=k, max_size=k, unique=True))
    known = np.asarray(data.draw(st.lists(st.integers(-1, k - 1), min_size=n, max_size=n)))
    known[0] = 0
    path = tmp_path_factory.mktemp("known") / "known.csv"
    with open(path, "w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(["id", "label"])
        writer.writerows([i, names[label] if label >= 0 else ""] for i, label in zip(ids, known, strict=True))
    np.testing.assert_array_equal(read_known(path, ids, names, k), known)


def test_every_kind_of_file_of_known_labels_says_the_same(write, tmp_path):
    np.savez(tmp_path / "whole.npz", known=np.asarray([-1, 1, 2]))
    np.savez(tmp_path / "some.npz", ids=np.asarray(["in/c.jpg", "in/b.jpg"]), labels=np.asarray(["7", "dog"]))
    np.savez(tmp_path / "numbers.npz", ids=np.asarray(["in/c.jpg", "in/b.jpg"]), labels=np.asarray([2, 1]))
    files = [
        write("id.csv", "\ufeffid,score,label\nin/c.jpg,0.5,7\nin/b.jpg,0.1,dog\nin/a.jpg,,\n"),
        write("path.csv", "path,label\nin/c.jpg,7\nin/b.jpg, dog \n"),
        write("row.csv", 'row,label\n2,"2"\n1,1\n0,\n'),
        tmp_path / "whole.npz",
        tmp_path / "some.npz",
        tmp_path / "numbers.npz",
    ]
    for path in files:
        assert read_known(path, IDS, NAMES, 3).tolist() == [-1, 1, 2], path


def test_a_number_that_is_a_name_is_the_name(write):
    path = write("k.csv", "id,label\nin/a.jpg,1\n")
    assert read_known(path, IDS, ["1", "0"], 2)[0] == 0
    assert read_known(path, IDS, None, 2)[0] == 1


def test_rows_stand_for_ids_where_there_are_none(write):
    assert read_known(write("k.csv", "id,label\n2,cat\n"), range(3), NAMES, 3).tolist() == [-1, -1, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "id,label\nx.jpg,cat\ny.jpg,cat\nz.jpg,dog\nw.jpg,dog\n",
            "do not exist: 'x.jpg', 'y.jpg', 'z.jpg' and 1 more",
        ),
        ("id,label\nin/a.jpg,cow\nin/b.jpg,dog\n", "no class: 'cow'. They must be class names, or numbers from 0 to 2"),
        ("id,label\nin/a.jpg,3\n", "no class: '3'"),
        ("id,label\nin/a.jpg,\n", "has only empty labels"),
        ("id,label\nin/a.jpg,cat\nin/a.jpg,dog\n", "two labels for 'in/a.jpg'"),
        ("name,label\nin/a.jpg,cat\n", "a column 'label' and one that identifies the sample, 'id', 'path', 'row'"),
        ("id\nin/a.jpg\n", "It has 'id'."),
        ("", "It has none."),
        ("id,label\nin/a,b.jpg,cat\n", "more values than its header"),
        ("row,label\n3,cat\n", "do not exist: '3'"),
        ('id,label\n"in/a.jpg,cat\n', "cannot be read"),
    ],
)
def test_known_labels_that_fit_nothing_are_a_sentence(write, tmp_path, text, words):
    with pytest.raises(FileError) as error:
        read_known(write("k.csv", text), IDS, NAMES, 3)
    assert words in str(error.value)
    assert len(str(error.value).replace(str(tmp_path), "")) <= 300


@pytest.mark.parametrize("known", [[0, 1], [0, 1, 3], [-2, 0, 0], [0.0, 1.0, 1.0]])
def test_an_array_of_known_labels_must_fit_the_samples(tmp_path, known):
    np.savez(tmp_path / "k.npz", known=np.asarray(known))
    with pytest.raises(FileError, match="one class number from 0 to 2 for each of the 3 samples, or -1"):
        read_known(tmp_path / "k.npz", IDS, NAMES, 3)


def test_objects_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "k.npz", known=np.asarray([None, 1, 2], dtype=object))
    with pytest.raises(FileError, match="holds Python objects"):
        read_known(tmp_path / "k.npz", IDS, NAMES, 3)


def test_ids_that_are_not_their_own_are_refused(write):
    with pytest.raises(FileError, match="ambiguous sample names: 'x'"):
        read_known(write("k.csv", "id,label\nx,cat\n"), ["x", "y", "x"], NAMES, 3)


def test_images_are_also_called_by_the_rest_of_their_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one/a/1.png", "two/a/1.png", "two/2.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    images = list_images(["one", "two"]).images
    names = other_names(images, ["one", "two"], None)
    assert {name: row for name, row in names.items() if not name.startswith("/")} == {"a/1.png": -1, "2.png": 1}
    assert names[str(tmp_path / "two" / "a" / "1.png")] == 2
    assert other_names(list_images(["two/**/*.png"]).images, ["two/**/*.png"], None)["a/1.png"] == 1
    (tmp_path / "list.txt").write_text("two/2.png\n")
    assert other_names(list_images(["list.txt"]).images, ["list.txt"], None)[str(tmp_path / "two" / "2.png")] == 0
    member = ImageFile("s.tar/a/1.png", tmp_path / "s.tar", 512, 10)
    assert other_names([member], ["s.tar"], None) == {"a/1.png": 0}


def test_every_kind_of_class_balance_says_the_same(write, tmp_path):
    np.save(tmp_path / "p.npy", [0.5, 0.25, 0.25])
    np.savez(tmp_path / "p.npz", class_prior=[0.5, 0.25, 0.25])
    files = [
        write("p.csv", "class,share\ndog,0.25\n7,0.25\n0,0.5\n"),
        write("p.json", json.dumps({"cat": 0.5, "dog": 0.25, "7": 0.25})),
        tmp_path / "p.npy",
        tmp_path / "p.npz",
    ]
    for path in files:
        assert read_class_prior(path, NAMES, 3).tolist() == [0.5, 0.25, 0.25], path


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.csv", "class,share\ncat,1\n", "has no share for 'dog', '7'; every class needs one"),
        ("p.csv", "class,share\ncat,1\ndog,1\n7,1\nowl,1\n", "no class: 'owl'"),
        ("p.csv", "class,share\ncat,1\ncat,1\ndog,1\n7,1\n", "two shares"),
        ("p.csv", "class,share\ncat,1\ndog,-1\n7,1\n", "at least 0 for 'dog'. Got '-1'"),
        ("p.csv", "class,share\ncat,1\ndog,many\n7,1\n", "Got 'many'"),
        ("p.csv", "class,share\ncat,1\ndog,nan\n7,1\n", "Got 'nan'"),
        ("p.csv", "name,share\ncat,1\n", "the columns 'class' and 'share'"),
        ("p.json", '{"cat": 1, "dog": 1, "dog": 2, "7": 1}', "two shares"),
        ("p.json", "[1, 2]", "must be a JSON object"),
        ("p.json", "{", "cannot be read"),
        ("p.txt", "1", "must be a .csv, .json, .npy or .npz"),
    ],
)
def test_a_class_balance_that_does_not_fit_is_a_sentence(write, name, text, words):
    with pytest.raises(FileError) as error:
        read_class_prior(write(name, text), NAMES, 3)
    assert words in str(error.value)


def test_a_class_balance_of_another_length_is_a_sentence(tmp_path):
    np.save(tmp_path / "p.npy", [0.5, 0.5])
    with pytest.raises(FileError, match=r"each of the 3 classes. Got shape \(2,\)"):
        read_class_prior(tmp_path / "p.npy", NAMES, 3)


def test_negatives_of_every_kind(tmp_path):
    from safetensors.numpy import save_file

    np.save(tmp_path / "n.npy", np.eye(2))
    np.savez(tmp_path / "n.npz", negatives=np.eye(2), other=np.zeros(1))
    save_file({"whatever": np.eye(2)}, tmp_path / "n.safetensors")
    for kind in ("npy", "npz", "safetensors"):
        np.testing.assert_array_equal(read_negatives(tmp_path / f"n.{kind}"), np.eye(2))
    np.savez(tmp_path / "n.npz", other=np.zeros(1))
    with pytest.raises(FileError, match="has no array 'negatives': it holds other"):
        read_negatives(tmp_path / "n.npz")


def test_groups_come_from_folders_columns_and_arrays(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    np.savez(tmp_path / "f.npz", image_features=np.eye(3), shop=np.asarray([1, 2, 1]), wide=np.eye(3))
    pq.write_table(
        pa.table({"id": IDS, "camera": ["x", None, "y"], "embedding": np.eye(3).tolist()}), tmp_path / "f.parquet"
    )
    assert read_groups(tmp_path / "f.npz", "shop", None, 3) == ["1", "2", "1"]
    assert read_groups(tmp_path / "f.parquet", "camera", IDS, 3) == ["x", "", "y"]
    assert read_groups(tmp_path / "f.parquet", "folder", IDS, 3) == ["in"] * 3
    refused = [
        ("f.npz", "folder", None, "has no ids"),
        ("f.npz", "camera", None, "has no array 'camera'"),
        ("f.npz", "wide", None, "one text or number for each of the 3 samples"),
        ("f.parquet", "shop", IDS, "must have a column 'shop'. It has 'id', 'camera', 'embedding'"),
        ("f.parquet", "embedding", IDS, "one text or number"),
        ("f.npy", "shop", None, "need a .parquet with that column"),
    ]
    for name, group_by, ids, words in refused:
        with pytest.raises(MoontideError, match=words):
            read_groups(tmp_path / name, group_by, ids, 3)


def test_a_header_of_thousands_of_names_takes_no_memory_of_its_own(write):
    names = ",".join(f"c{i}" for i in range(4000))
    path = write("known.csv", f"id,label,{names}\n" + "".join(f"{i},0\n" for i in range(4000)))
    tracemalloc.start()
    try:
        assert (read_known(path, range(4000), None, 2) == 0).all()
        assert tracemalloc.get_traced_memory()[1] < 2**25  # 4000 x 4000 cells would take four times that
    finally:
        tracemalloc.stop()
