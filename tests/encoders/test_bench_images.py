"""The benchmark over images: they are encoded, with views for MTA, and TENT adapts the encoder that did it."""

from collections import Counter

import numpy as np
import pytest

from moontide.bench.data import read_pack
from moontide.bench.records import read_records
from moontide.encoders import encoder
from moontide.errors import FileError, OptionError
from moontide.store.features import FeatureStore
from moontide.store.views import add_views, open_views
from moontide.views import make_views

from .conftest import picture

SUITE = """
version = 1
title = "All rows of the main tables"
runs = 1
methods = ["zero_shot", "mta", "tent", "moon"]

[[scenario]]
name = "few"
stream = "iid"
batch_size = 6
"""


@pytest.fixture
def photos(tmp_path):
    for name, seeds in (("cat", range(6)), ("dog", range(6, 12))):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for seed in seeds:
            picture(seed).save(tmp_path / "photos" / name / f"{seed}.png")
    return tmp_path / "photos"


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "mine.toml").write_text(SUITE)
    return tmp_path / "mine.toml"


def test_every_row_of_the_main_tables_is_filled_by_one_command_on_images(run, photos, suite, clip_folder, tmp_path):
    command = (
        "bench", "run", suite, "--data", photos, "--dataset", "folders", "--encoder", clip_folder,
        "--out", tmp_path / "out",
    )  # fmt: skip
    status, _, notes = run(*command)
    assert (status, "skipped" in notes, "failed" in notes) == (0, False, False)
    records = list(read_records(tmp_path / "out"))
    assert Counter(r["method"] for r in records) == {"zero_shot": 1, "mta": 1, "tent": 1, "moon": 1}
    assert len({r["zero_shot"] for r in records}) == 1  # TENT begins with the same encoder as the features
    views = open_views(FeatureStore.open(tmp_path / "out" / "features" / "folders"))
    assert views[np.arange(12)].shape == (12, 64, 16)
    assert "4 found" in run(*command)[2]


def test_the_time_of_the_encoder_stands_beside_that_of_the_methods(run, photos, clip_folder, tmp_path):
    suite = tmp_path / "time.toml"
    suite.write_text(SUITE.replace("runs = 1", "runs = 1\ntiming = true").replace('"mta", "tent", ', ""))
    out = tmp_path / "out"
    options = ("--data", photos, "--dataset", "folders", "--encoder", clip_folder, "--out", out)
    assert run("bench", "run", suite, *options)[0] == 0
    assert all(record["forward"] > 0 for record in read_records(out))
    assert run("bench", "report", out)[0] == 0
    assert "encoder" in (out / "report" / "report.md").read_text()


def test_views_depend_on_the_image_alone_and_are_not_made_twice(run, photos, clip_folder, tmp_path):
    store = tmp_path / "store"
    command = ("encode", photos, "--dataset", "folders", "--out", store, "--encoder", clip_folder, "--views", 5)
    assert run(*command, "--shard-size", 5, "--encode-batch", 5)[0] == 0
    made = FeatureStore.open(store)
    views = open_views(made)
    files = sorted((store / "views").iterdir())
    times = [path.stat().st_mtime_ns for path in files]
    assert len(files) == len(made.shards) > 1
    assert np.allclose(views[np.arange(12)][:, 0], made.take(np.arange(12)), atol=2e-3)  # view 0 is the image
    files[1].unlink()
    assert run(*command)[0] == 0
    again = open_views(made)
    assert np.array_equal(again[np.arange(12)], views[np.arange(12)])
    assert [files[0].stat().st_mtime_ns, files[-1].stat().st_mtime_ns] == [times[0], times[-1]]
    status, _, notes = run(*command[:-1], 6)
    assert (status, "holds 5 views" in notes) == (2, True)
    status, _, notes = run(*command[:-1], 3)
    assert (status, "'views' must be at least 5" in notes) == (2, True)


def test_a_store_whose_images_or_encoder_are_others_is_refused(run, photos, clip_folder, tmp_path):
    store = tmp_path / "store"
    assert run("encode", photos, "--dataset", "folders", "--out", store, "--encoder", clip_folder)[0] == 0
    made = encoder(str(clip_folder))
    assert read_pack(store, made).extras.keys() == {"images", "encoder"}
    made.id = "another"
    with pytest.raises(FileError, match="made by the encoder"):
        read_pack(store, made)
    made.id = FeatureStore.open(store).origin.encoder
    (photos / "cat" / "0.png").unlink()
    with pytest.raises(FileError, match=r"cat/0\.png of .* no longer exists"):
        read_pack(store, made)


def test_fewer_views_than_mta_can_use_are_refused(clip_folder, tmp_path):
    with pytest.raises(OptionError, match="at least 5"):
        add_views(None, None, [], 4)
    assert make_views(encoder(str(clip_folder)), [picture()], 5).shape == (1, 5, 16)
