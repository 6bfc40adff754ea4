"""From images to labels by the command line, with an encoder that a plug-in package brings: it sees colours."""

import csv
import io
import json
import os
import re
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from moontide.classify import classify_store, folder_labels, located, thumbnail
from moontide.encoders import encoder
from moontide.encoders.sources import list_images
from moontide.errors import InputError
from moontide.store.features import FeatureStore

pillow = pytest.importorskip("PIL.Image")

COLOURS = ["red", "lime", "blue", "yellow", "cyan", "magenta"]
GOOD, BAD = 190, 10


ARGUMENTS = ("--classes", ",".join(COLOURS), "--encoder", "colour")


def add_bad_files(folder):
    """Add ten files that are named like images and are none, or none that can be decoded."""
    whole = (folder / "000.png").read_bytes()
    pillow.new("RGB", (8, 8)).save(folder / "jpeg.jpg")
    jpeg = (folder / "jpeg.jpg").read_bytes()
    (folder / "jpeg.jpg").unlink()
    (folder / "bad-empty.png").write_bytes(b"")
    (folder / "bad-text.jpg").write_text("this is not an image")
    (folder / "bad-page.gif").write_text("<html><script>alert(1)</script></html>")
    (folder / "bad-cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "bad-cut.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    (folder / "bad-noise.webp").write_bytes(np.random.default_rng(0).bytes(500))
    (folder / "bad-header.png").write_bytes(whole[:16] + b"\xff\xff\xff\xff" + whole[20:])
    (folder / "bad-drawing.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    pillow.new("L", (4000, 1)).save(folder / "bad-line.png")
    (folder / "bad-link.png").symlink_to(folder / "nothing.png")


def test_ten_bad_files_among_two_hundred_are_named_and_skipped(moontide, tmp_path, paint, rows_of):
    rng = np.random.default_rng(1)
    for i in range(GOOD):
        paint(tmp_path / "photos" / f"{i:03d}.png", COLOURS[i % 3], rng)
    add_bad_files(tmp_path / "photos")
    status, out, err = moontide("classify", "photos", *ARGUMENTS, "--out", "labels.csv", "--report", "report.html")
    assert status == 0
    rows = rows_of("labels.csv")
    assert len(rows) == GOOD
    assert not any("bad" in row["id"] for row in rows)
    named = [line for line in err.splitlines() if line.startswith("skipped photos/bad-")]
    assert len(named) == BAD
    assert all(": it is " in line or ": it has " in line or ": it cannot " in line for line in named)
    assert f"{GOOD} labelled, {BAD} skipped" in out
    assert "bad-cut.jpg" in (tmp_path / "report.html").read_text()
    assert "Traceback" not in err
    again, _, _ = moontide("classify", "photos", *ARGUMENTS, "--out", "again.csv", "--strict")
    assert again == 1
    assert rows_of("again.csv") == rows


def test_strict_is_content_where_nothing_is_skipped(moontide, photos):
    assert moontide("classify", "photos", *ARGUMENTS, "--out", "labels.csv", "--strict")[0] == 0


def test_only_bad_files_are_a_sentence(moontide, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("no")
    status, _, err = moontide("classify", "photos", *ARGUMENTS)
    assert status == 2
    assert "None of the 1 images can be used; photos/a.jpg: it is not an image of a known format." in err


def test_every_kind_of_table_says_the_same(moontide, photos, rows_of):
    arrow = pytest.importorskip("pyarrow.parquet")
    for kind in ("csv", "jsonl", "parquet"):
        assert moontide("classify", "photos", *ARGUMENTS, "--out", f"labels.{kind}")[0] == 0
    tables = [
        rows_of("labels.csv"),
        [json.loads(line) for line in Path("labels.jsonl").read_text().splitlines()],
        arrow.read_table("labels.parquet").to_pylist(),
    ]
    for row in tables[0]:
        row.update(confidence=float(row["confidence"]), unknown=float(row["unknown"]), top5=json.loads(row["top5"]))
    assert tables[0] == tables[1] == tables[2]
    assert list(tables[0][0]) == ["id", "path", "label", "confidence", "top5", "zero_shot_label", "unknown"]
    for row in tables[0]:
        assert row["label"] == row["top5"][0]["label"] == row["id"].split("/")[1]
        assert row["confidence"] == row["top5"][0]["confidence"]
        shares = [entry["confidence"] for entry in row["top5"]]
        assert len(shares) == 5
        assert shares == sorted(shares, reverse=True)
        assert row["path"] == os.path.abspath(row["id"])


def test_without_out_the_labels_are_printed(moontide, photos):
    status, out, err = moontide("classify", "photos", *ARGUMENTS)
    assert status == 0
    assert [row["id"] for row in csv.DictReader(out.splitlines())] == sorted(
        f"photos/{p.parent.name}/{p.name}" for p in photos.glob("*/*")
    )
    assert "12 labelled, 0 skipped" in err


def test_every_kind_of_input_gives_the_same_labels(moontide, photos, tmp_path, rows_of):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    paths = sorted(str(path.relative_to(tmp_path)) for path in photos.glob("*/*"))
    (tmp_path / "list.txt").write_text("\n".join(paths))
    (tmp_path / "list.csv").write_text("\n".join(["size,path", *(f"1,{path}" for path in paths)]))
    parquet.write_table(arrow.table({"path": paths}), tmp_path / "list.parquet")
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for path in paths:
            archive.add(tmp_path / path, path)
    found = {}
    for given in ("photos", "photos/*/*.png", "list.txt", "list.csv", "list.parquet", "shard.tar"):
        status, _, err = moontide("classify", given, *ARGUMENTS, "--out", "labels.csv", "--report", "report.html")
        assert status == 0, err
        rows = rows_of("labels.csv")
        found[given] = sorted((row["id"].rpartition("photos/")[2], row["label"], row["top5"]) for row in rows)
        assert '"pictures":{"0":' in (tmp_path / "report.html").read_text()
    assert len(found["photos"]) == 12
    assert all(one == found["photos"] for one in found.values())


def test_folder_names_score_the_labels_where_they_are_classes(moontide, photos, tmp_path, paint):
    _, out, _ = moontide("classify", "photos", *ARGUMENTS, "--out", "labels.csv")
    assert "adapted    100.00 %" in out
    paint(tmp_path / "photos" / "holiday" / "x.png", "red", np.random.default_rng(0))
    _, out, _ = moontide("classify", "photos", *ARGUMENTS, "--out", "labels.csv")
    assert "adapted" not in out
    assert "classes    red" in out


def test_folder_names_match_classes_whatever_their_spelling():
    names = ["polar bear", "t-shirt", "polar bear"]
    assert folder_labels(["a/Polar_Bear/1.jpg", "t shirt/2.jpg"], names).tolist() == [0, 1]
    assert folder_labels(["1.jpg"], names) is None
    assert folder_labels(["polar bear/1.jpg", "bear/2.jpg"], names) is None


def test_a_store_gives_the_labels_of_its_images(moontide, photos, tmp_path, rows_of):
    assert moontide("encode", "photos", "--out", "store", *ARGUMENTS)[0] == 0
    assert moontide("classify", "photos", *ARGUMENTS, "--out", "direct.csv")[0] == 0
    assert moontide("classify", "store", "--out", "labels.csv", "--report", "report.html")[0] == 0
    assert rows_of("labels.csv") == rows_of("direct.csv")
    assert '"pictures":{"0":' in (tmp_path / "report.html").read_text()
    assert (
        moontide("classify", "store", "--classes", "red,black", "--out", "other.csv")[0] == 0
    )  # the store's own encoder
    assert {row["label"] for row in rows_of("other.csv")} == {"red", "black"}


def test_pictures_of_a_store_are_found_in_archives(moontide, photos, tmp_path):
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        archive.add(photos, "photos")
    assert moontide("encode", "shard.tar", "--out", "store", *ARGUMENTS)[0] == 0
    images = located(FeatureStore.open("store").ids)
    assert [image.read().size for image in images] == [(24, 16)] * 12
    (tmp_path / "shard.tar").write_bytes(b"changed")
    assert [thumbnail(image, 8) for image in located([image.id for image in images])] == [None] * 12


def test_a_store_refuses_another_encoder(moontide, photos):
    assert moontide("encode", "photos", "--out", "store", *ARGUMENTS)[0] == 0
    status, _, err = moontide("classify", "store", "--classes", "red,blue", "--encoder", "colour:other")
    assert status == 2
    assert "was made by the encoder colour with its preprocessing" in err


def test_an_empty_store_is_a_sentence(tmp_path):
    from moontide.store.features import Origin

    store = FeatureStore.create(tmp_path / "store", Origin("colour", "", ("{}",)), ["a"], np.ones((1, 3)))
    with pytest.raises(InputError, match="has no images"):
        classify_store(store)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("photos", "--encoder", "colour"), "'--classes' must list the class names"),
        (("photos", *ARGUMENTS, "--out", "labels.txt"), "must end in .csv, .jsonl, .json"),
        (("photos", *ARGUMENTS, "--report", "report.pdf"), "must end in .html"),
        (("photos", *ARGUMENTS, "--report", "no/report.html"), "does not exist"),
        (("photos", *ARGUMENTS, "--batch-size", "0"), "'--batch-size' must be at least 1"),
        (("photos", *ARGUMENTS, "--method", "mooon"), "Did you mean 'moon'?"),
        (("photos", *ARGUMENTS, "--template", "a photo"), "must contain {} in place of the class name"),
        (("nowhere", *ARGUMENTS), "There is no file or folder nowhere."),
        (("photos", "--classes", "red,blue", "--encoder", "colur:x"), "Did you mean 'colour'?"),
        (("store", "photos", *ARGUMENTS), "A store must be the only path"),
        (("store", "--root", "photos"), "A store must be the only path"),
        (("store", "--encoder", "colour"), "have no effect on a store without '--classes'"),
        (("store", "--template", "a {}"), "have no effect on a store without '--classes'"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(moontide, photos, tmp_path, arguments, sentence):
    assert moontide("encode", "photos", "--out", "store", *ARGUMENTS)[0] == 0
    before = sorted(tmp_path.iterdir())
    status, out, err = moontide("classify", *arguments)
    assert (status, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_methods_options_batches_and_templates_are_used(moontide, photos, tmp_path, rows_of):
    for options in (
        ("--method", "zero_shot"),
        ("--method", "moon", "--set", "neighbours=1"),
        ("--batch-size", "5"),
        ("--template", "plain {}"),
    ):
        status, _, err = moontide(
            "classify", "photos", *ARGUMENTS, *options, "--out", "labels.csv", "--report", "report.html"
        )
        assert status == 0, err
    status, out, _ = moontide("classify", "photos", *ARGUMENTS, "--method", "zero_shot", "--out", "labels.csv")
    assert "changed    0 of 12" in out
    assert all(row["label"] == row["zero_shot_label"] for row in rows_of("labels.csv"))


def test_doubtful_class_names_are_reported_and_kept(moontide, photos):
    status, _, err = moontide(
        "classify", "photos", "--classes", "red,lime,blue,#0000fe", "--encoder", "colour", "--out", "a.csv"
    )
    assert status == 0
    assert "warning: class names are almost the same to the encoder" in err


def test_a_thumbnail_is_small_upright_and_bare(tmp_path):
    image = pillow.new("RGB", (400, 200), "red")
    exif = image.getexif()
    exif[0x0112], exif[0x010E] = 6, "a secret"  # turned by a quarter, with a description
    image.save(tmp_path / "a.jpg", exif=exif)
    jpeg = thumbnail(list_images([tmp_path]).images[0], 64)
    with pillow.open(io.BytesIO(jpeg)) as small:
        assert small.size == (32, 64)
    assert b"secret" not in jpeg


def test_help_has_an_example_and_says_what_each_flag_does(moontide):
    for command in ("classify", "demo"):
        status, out, err = moontide(command, "--help")
        assert (status, err) == (0, "")
        assert f"moontide {command}" in out.partition("For example:")[2]


def test_demo_without_photographs_shows_the_simulated_part(moontide, tmp_path):
    status, out, err = moontide("demo", "--images", "nowhere", "--out", "out/demo", "--batches", 4)
    assert status == 0
    assert "There is no file or folder nowhere. The demo continues without photographs." in err
    assert "Simulated features" in out
    assert "Photographs as" not in out
    assert (tmp_path / "out/demo/accuracy.png").read_bytes()[:4] == b"\x89PNG"
    assert not (tmp_path / "out/demo/report.html").exists()


@pytest.fixture
def clothes(tmp_path, request):
    """A few of the photographs that come with the project."""
    try:
        encoder("tiny")
    except ImportError as error:
        pytest.skip(str(error))
    examples = request.config.rootpath / "examples" / "clothing"
    for name in ("hat", "pants", "shoes"):
        (tmp_path / "clothes" / name).mkdir(parents=True)
        for path in sorted((examples / name).iterdir())[:4]:
            (tmp_path / "clothes" / name / path.name).write_bytes(path.read_bytes())
    return tmp_path / "clothes"


def test_photographs_with_the_encoder_that_needs_no_hub(moontide, clothes, tmp_path, rows_of):
    files = ("--out", "labels.csv", "--report", "report.html")
    status, _, err = moontide(
        "classify", "clothes", "--classes", "hat, pants, shoes, espresso", "--encoder", "tiny", *files
    )
    assert status == 0, err
    right = [row["label"] == row["id"].split("/")[1] for row in rows_of("labels.csv")]
    assert sum(right) >= 6  # 3 by chance
    assert "not CLIP" in (tmp_path / "report.html").read_text()


def test_demo_on_photographs(moontide, clothes, tmp_path):
    status, out, err = moontide("demo", "--images", "clothes", "--out", "out", "--batches", 2)
    assert status == 0, err
    assert "Photographs as one task, 3 classes, encoder tiny (not CLIP)" in out
    assert len(re.findall(r"12 +3(?: +[\d.]+ %){3}", out)) == 1, "zero-shot, MOON and TIDE on all twelve"
    assert len(re.findall(r"mean(?: +[\d.]+ %){3}", out)) == 1, "and on the simulated batches"
    look, _, typed = out.partition("Where to look:")[2].partition("What to type next:")
    assert "out/report.html" in look
    assert "out/accuracy.png" in look
    assert "moontide classify FOLDER" in typed
    assert "tide" in (tmp_path / "out" / "report.html").read_text()
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
@pytest.mark.parametrize("kind", ["csv", "jsonl", "json", "xlsx", "parquet"])
def test_a_photo_whose_name_is_not_utf_8_is_in_every_table(moontide, photos, colours, rows_of, kind):
    pytest.importorskip({"xlsx": "openpyxl", "parquet": "pyarrow"}.get(kind, "csv"))
    os.rename(photos / "red" / "00.png", os.fsencode(photos / "red") + b"/caf\xe9.png")
    status, _, err = moontide("classify", photos, *colours, "--out", f"out.{kind}", "--report", "out.html")
    assert (status, "error" in err) == (0, False)
    if kind == "csv":
        (path,) = [row["path"] for row in rows_of("out.csv") if "caf" in row["id"]]
        assert path.endswith("/red/caf\\xe9.png")
        Path("known.csv").write_text(f"path,label\n{path},lime\n")
        assert moontide("classify", photos, *colours, "--known", "known.csv", "--out", "out.csv")[0] == 0
        assert [row["label"] for row in rows_of("out.csv") if row["known"] == "True"] == ["lime"]
