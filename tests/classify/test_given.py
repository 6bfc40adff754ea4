"""Images with known labels, a class balance, negative names and groups, by the command line."""

import csv
import json

import numpy as np
import pytest

from moontide.store.features import NEGATIVES, FeatureStore

pytest.importorskip("PIL.Image")


@pytest.fixture
def texts(monkeypatch):
    """Every prompt that the encoder is given."""
    from moontide.encoders import Encoder

    seen = []
    encode = Encoder.encode_text
    monkeypatch.setattr(Encoder, "encode_text", lambda self, prompts: seen.extend(prompts) or encode(self, prompts))
    return seen


@pytest.mark.parametrize("name", ["photos/red/00.png", "red/00.png", "absolute"])
@pytest.mark.parametrize("key", ["id", "path"])
def test_an_image_is_known_by_its_id_its_path_and_its_place_in_the_folder(
    moontide, photos, tmp_path, colours, rows_of, name, key
):
    name = str(photos / "red" / "00.png") if name == "absolute" else name
    (tmp_path / "known.csv").write_text(f"{key},label\n{name},lime\n")
    status, out, err = moontide("classify", "photos", *colours, "--known", "known.csv", "--out", "labels.csv")
    assert status == 0, err
    rows = {row["id"]: row for row in rows_of("labels.csv")}
    known = rows.pop("photos/red/00.png")
    assert (known["label"], float(known["confidence"]), known["known"]) == ("lime", 1.0, "True")
    assert all(row["known"] == "False" and row["label"] == row["id"].split("/")[1] for row in rows.values())
    assert "known      1 of 12 labels" in out
    assert "adapted    100.00 %" in out  # of the others


def test_the_table_of_one_run_is_read_by_the_next(moontide, photos, colours, rows_of):
    assert moontide("classify", "photos", *colours, "--out", "labels.csv")[0] == 0
    rows = rows_of("labels.csv")
    rows[0]["label"] = "cyan"
    for row in rows[3:]:
        row["label"] = ""
    with open("known.csv", "w", newline="") as handle:
        writer = csv.DictWriter(handle, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert moontide("encode", "photos", "--out", "store", *colours)[0] == 0
    for given in ("photos", "store"):
        options = [] if given == "store" else colours
        assert moontide("classify", given, *options, "--known", "known.csv", "--out", "again.csv")[0] == 0
        again = rows_of("again.csv")
        assert [row["known"] for row in again] == ["True"] * 3 + ["False"] * 9
        assert again[0]["label"] == "cyan"


def test_unknown_names_and_classes_are_refused_before_anything_is_encoded(moontide, photos, tmp_path, colours):
    broken = [
        ("id,label\nred/99.png,lime\nblue/98.png,red\n", "do not exist: 'red/99.png', 'blue/98.png'"),
        ("id,label\nred/00.png,pink\n", "no class: 'pink'"),
    ]
    for text, words in broken:
        (tmp_path / "known.csv").write_text(text)
        status, out, err = moontide(
            "classify", "photos", "--classes", "red,lime", "--encoder", "no", "--known", "known.csv"
        )
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_a_class_balance_reaches_the_method(moontide, photos, tmp_path, colours, tasks):
    shares = {"red": 2, "lime": 1, "blue": 1, "yellow": 0, "cyan": 0, "magenta": 0}
    (tmp_path / "shares.json").write_text(json.dumps(shares))
    assert moontide("classify", "photos", *colours, "--class-prior", "shares.json", "--out", "labels.csv")[0] == 0
    np.testing.assert_allclose(tasks[0].class_prior, [0.5, 0.25, 0.25, 0, 0, 0])


def test_folders_are_groups(moontide, photos, colours, rows_of, tasks):
    status, out, err = moontide(
        "classify", "photos", *colours, "--group-by", "folder", "--out", "a.csv", "--report", "a.html"
    )
    assert status == 0, err
    assert [task.n for task in tasks] == [3, 3, 6]
    assert [row["group"] for row in rows_of("a.csv")] == ["photos/blue"] * 3 + ["photos/lime"] * 3 + ["photos/red"] * 6
    assert "group photos/red: 6 samples, " in out
    assert "adapted " in out


def test_a_column_of_a_list_is_a_group(moontide, photos, tmp_path, colours, rows_of, tasks):
    paths = sorted(str(path.relative_to(tmp_path)) for path in photos.glob("*/*"))
    lines = [f"{path},{'day' if i % 2 else 'night'}" for i, path in enumerate(paths)]
    (tmp_path / "list.csv").write_text("\n".join(["path,time", *lines]))
    assert moontide("classify", "list.csv", *colours, "--group-by", "time", "--out", "a.csv")[0] == 0
    assert [task.n for task in tasks] == [6, 6]
    assert [row["group"] for row in rows_of("a.csv")] == ["night", "day"] * 6
    status, _, err = moontide("classify", "list.csv", *colours, "--group-by", "shop")
    assert (status, "must have a column 'shop'. It has 'path', 'time'" in err) == (2, True)
    status, _, err = moontide("classify", "photos", *colours, "--group-by", "time")
    assert (status, "must be in a list of images, a .csv or .parquet" in err) == (2, True)


def test_negative_names_are_embedded_in_the_prompts_of_the_classes(
    moontide, photos, tmp_path, colours, texts, tasks, rows_of
):
    (tmp_path / "words.txt").write_text("black\nRed\nwhite\nblack\n")
    options = ["--negatives", "words.txt", "--template", "plain {}", "--out", "labels.csv"]
    status, _, err = moontide("classify", "photos", *colours, *options)
    assert status == 0, err
    assert "negatives: left out names that are classes: Red\n" in err
    assert texts[6:] == ["plain black", "plain white"]
    assert tasks[0].negatives.shape == (2, 48)
    assert "unknown" in rows_of("labels.csv")[0]
    (tmp_path / "words.txt").write_text("red\n")
    status, _, err = moontide("classify", "photos", *colours, *options)
    assert (status, "must have at least one name that is not a class" in err) == (2, True)


def test_a_store_keeps_negatives_until_the_words_change(moontide, photos, tmp_path, colours, texts, tasks):
    assert moontide("encode", "photos", "--out", "store", *colours)[0] == 0
    before = FeatureStore.open("store")
    (tmp_path / "words.txt").write_text("black\nwhite\n")
    texts.clear()
    for words, embedded in ((None, ["black", "white"]), (None, []), ("gray\n", ["gray"]), (None, [])):
        if words is not None:
            (tmp_path / "words.txt").write_text(words)
        texts.clear()
        assert moontide("classify", "store", "--negatives", "words.txt", "--out", "labels.csv")[0] == 0
        assert texts == embedded
    np.testing.assert_array_equal(tasks[0].negatives, tasks[1].negatives)
    assert tasks[2].negatives.shape == (1, 48)
    assert FeatureStore.open("store").hash == before.hash
    before.verify()
    (tmp_path / "store" / NEGATIVES).write_bytes(b"cut")  # nothing is lost with it
    assert moontide("classify", "store", "--negatives", "words.txt", "--out", "labels.csv")[0] == 0
    assert texts == ["gray"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--negatives", "black,white", "--method", "moon"], "The method moon cannot use negative names"),
        (["--known", "known.csv", "--method", "moon"], "cannot use known labels"),
        (["--known", "known.csv", "--out", "known.csv"], "is also an input of this command"),
        (["--class-prior", "shares.txt"], "must be a .csv, .json, .npy or .npz"),
        (["--negatives", "nowhere.txt"], "There is no file nowhere.txt"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(moontide, photos, tmp_path, colours, arguments, words):
    (tmp_path / "known.csv").write_text("id,label\nred/00.png,lime\n")
    status, out, err = moontide("classify", "photos", *colours, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_a_store_has_no_columns_and_its_own_prompts(moontide, photos, colours):
    assert moontide("encode", "photos", "--out", "store", *colours)[0] == 0
    status, _, err = moontide("classify", "store", "--group-by", "camera")
    assert (status, "has folders but no columns" in err) == (2, True)
    status, _, err = moontide("classify", "store", "--negatives", "black,white", "--template", "a {}")
    assert (status, "have no effect on a store without '--classes'" in err) == (2, True)
