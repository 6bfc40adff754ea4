"""The page of a classification: what goes into it, how much, and that no name in it is markup."""

import base64
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moontide
from moontide import projection
from moontide.evaluate import split_rows
from moontide.metrics import expected_calibration_error
from moontide.report import gallery
from moontide.report.gallery import gallery_data, leading, neighbours, pack, page, pictured, shares, write_gallery
from moontide.simulate import simulate
from moontide.types import Task

NASTY = [
    "</script><script>hacked()</script>",
    "<img src=x onerror=hacked()>",
    "<!--",
    "a & b",
    '"quoted"',
    "\u2028",
    "\udcff",
]


def unpack(packed):
    values = np.frombuffer(base64.b64decode(packed["data"]), f"<{packed['type']}")
    return values.reshape(-1, packed["width"]) if packed["width"] > 1 else values


def data_of(path):
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', path.read_text(), re.S)
    return json.loads(found[1])


@pytest.fixture(scope="module")
def labelled():
    data = simulate(60, 20, dim=32, effective_classes=4)
    task = Task(data.features, data.text, data.logit_scale, data.class_names)
    return task, moontide.MOON().fit_predict(task), data.labels


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_packed_numbers_come_back(values):
    assert unpack(pack(values)).tolist() == values


def test_packed_rows_come_back_in_the_smallest_type():
    rows = np.arange(6).reshape(3, 2)
    assert unpack(pack(rows)).tolist() == rows.tolist()
    assert [pack([n])["type"] for n in (255, 256, 65536)] == ["u1", "u2", "u4"]
    assert pack(np.zeros((3, 0)))["width"] == 0


@given(st.integers(1, 8), st.integers(1, 9), st.integers(0, 99))
def test_leading_classes_are_those_of_a_full_sort(m, k, seed):
    scores = np.random.default_rng(seed).integers(4, size=(5, k)).astype(float)  # with ties
    full = np.argsort(-scores, axis=1, kind="stable")[:, :m]
    found = leading(scores, m)
    assert np.take_along_axis(scores, found, axis=1).tolist() == np.take_along_axis(scores, full, axis=1).tolist()
    assert all(len(set(row)) == len(row) for row in found.tolist())


def test_the_page_holds_what_the_result_says(labelled, tmp_path):
    task, result, labels = labelled
    names = [f"photos/{i}.jpg" for i in range(task.n)]
    write_gallery(
        tmp_path / "a.html", task, result, names, lambda i, side: bytes([i]), truth=labels, skipped=[("b.jpg", "cut")]
    )
    data = data_of(tmp_path / "a.html")
    assert unpack(data["label"]).tolist() == result.labels.tolist()
    assert unpack(data["before"]).tolist() == result.zero_shot_labels.tolist()
    assert unpack(data["truth"]).tolist() == labels.tolist()
    assert unpack(data["top"])[:, 0].tolist() == result.labels.tolist()
    np.testing.assert_allclose(unpack(data["top_now"])[:, 0] / 1e4, result.confidence, atol=1e-4)
    assert unpack(data["neighbours"]).tolist() == result.details["graph"].neighbours.tolist()
    np.testing.assert_allclose(data["beta"], result.beta, atol=1e-4)
    assert (data["prefix"], data["names"][3]) == ("photos/", "3.jpg")
    assert base64.b64decode(data["pictures"]["7"]) == b"\7"
    assert data["skipped"] == [["b.jpg", "cut"]]


def test_a_picture_that_cannot_be_made_is_left_out(labelled, tmp_path):
    task, result, _ = labelled
    names = [str(i) for i in range(task.n)]
    write_gallery(tmp_path / "a.html", task, result, names, lambda i, side: None if i else b"x")
    assert list(data_of(tmp_path / "a.html")["pictures"]) == ["0"]


@pytest.mark.parametrize(("n", "pictures", "side"), [(10, 10, 256), (1600, 1500, 128)])
def test_pictures_are_bounded_and_smaller_where_there_are_many(monkeypatch, tmp_path, n, pictures, side):
    monkeypatch.setattr(projection, "LANDMARKS", 50)
    task = Task(np.eye(3, dtype=np.float32)[np.arange(n) % 3], np.eye(3, dtype=np.float32))
    asked = []
    result = moontide.method("zero_shot").fit_predict(task)
    write_gallery(tmp_path / "a.html", task, result, ["x"] * n, lambda i, side: asked.append(side))
    assert asked == [side] * pictures


def test_changed_images_and_their_neighbours_are_pictured_first():
    near = (np.arange(5000)[:, None] + [1, 2]) % 5000
    changed = np.arange(0, 900, 3)
    chosen = set(pictured(changed, near).tolist())
    assert len(chosen) == gallery.THUMBNAILS
    assert set(changed.tolist()) | set(near[changed].ravel().tolist()) <= chosen
    many = np.arange(3000)
    assert set(pictured(many, near).tolist()) <= set(range(3002))


def test_neighbours_stay_in_their_batch(labelled):
    task, result, _ = labelled
    found = neighbours(task, result, split_rows(60, None, 25))  # the last batch has 10
    assert found.neighbours.shape == (60, 3)
    assert (found.neighbours // 25 == np.arange(60)[:, None] // 25).all()
    last = neighbours(task, result, split_rows(60, None, 59)).neighbours[59]
    assert last.tolist() == [59, 59, 59]  # alone in its batch


def test_names_are_data_and_never_markup(tmp_path):
    names = NASTY
    task = Task(np.eye(len(names)), np.eye(len(names)), class_names=names)
    html = page(gallery_data(task, moontide.MOON().fit_predict(task), names) | {"graph": None, "pictures": {}})
    plain = page({})
    for token in ("<script", "</script", "<img", "<!--", "onerror"):
        extra = html.lower().count(token) - plain.lower().count(token)
        assert extra == (html.count("onerror") if token == "onerror" else 0), token
    found = json.loads(re.search(r'type="application/json">(.*?)</script>', html, re.S)[1])
    assert found["classes"] == names
    html.encode()  # also with a file name that is not UTF-8


def test_the_page_refers_to_nothing_outside_itself():
    html = page({})
    assert not re.findall(r'(?:src|href)="(?!#)|url\(|@import|https?://(?!www\.w3\.org/2000/svg)', html)
    assert "default-src 'none'" in html


@pytest.mark.parametrize("n", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("equal", [True, False])
def test_every_number_of_images_makes_a_page(tmp_path, n, equal):
    rows = np.random.default_rng(0).normal(size=(n, 8)) if not equal else np.ones((n, 8))
    task = Task(rows, np.eye(8)[:3])
    write_gallery(tmp_path / "a.html", task, moontide.MOON().fit_predict(task), ["x"] * n, lambda i, side: b"x")
    assert data_of(tmp_path / "a.html")["n"] == n


def test_shares_are_clipped_and_rounded():
    assert shares(np.asarray([1.00004, 0.12345])).tolist() == [10000, 1234]


def test_calibration_is_pooled_over_what_the_method_was_not_given(labelled):
    task, _, _ = labelled
    rng = np.random.default_rng(0)
    truth = rng.integers(task.k, size=task.n)
    known = np.where(np.arange(task.n) < 20, truth, -1)
    given = Task(task.features, task.text, task.logit_scale, task.class_names, known=known)
    result = moontide.TIDE().fit_predict(given)
    found = gallery_data(given, result, ["x"] * task.n, truth)["calibration"]
    rest = slice(20, None)
    error = expected_calibration_error(truth[rest], result.labels[rest], result.confidence[rest])
    assert found["ece"][1] == pytest.approx(error, abs=1e-4)
    assert found["samples"] == sum(count for _, _, count in found["now"]) == task.n - 20
    right = sum(accuracy * count for _, accuracy, count in found["now"])
    assert right == pytest.approx((result.labels == truth)[rest].sum(), abs=0.01)
    everything = Task(task.features, task.text, task.logit_scale, task.class_names, known=truth)
    data = gallery_data(everything, moontide.TIDE().fit_predict(everything), ["x"] * task.n, truth)
    assert data["calibration"] is None


def test_a_report_is_known_by_its_images_classes_and_labels(labelled):
    task, result, _ = labelled
    names = [str(i) for i in range(task.n)]
    same = gallery_data(task, result, names)["report"]
    assert gallery_data(task, result, names)["report"] == same
    assert gallery_data(task, result, names[::-1])["report"] != same
    assert gallery_data(task, moontide.method("zero_shot").fit_predict(task), names)["report"] != same
