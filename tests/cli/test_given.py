"""Known labels, class balance, negatives and groups on the command line of `adapt` and `stream`."""

import csv
import json

import numpy as np
import pytest

import moontide as library
from moontide.evaluate import compare_groups, run_groups, scored_rows, split_rows
from moontide.protocols import OnlineMethod, PerBatch
from moontide.store.files import read_task
from moontide.streams import run_stream

NAMES = ["ant", "bee", "cat", "dog"]


@pytest.fixture
def wrong(arrays):
    """The samples that zero-shot has wrong, and others, with their labels: what a person would put right."""
    task = library.Task(arrays["image_features"], arrays["text_features"], 20.0)
    first = np.flatnonzero(library.method("zero_shot").fit_predict(task).labels != arrays["labels"])
    assert first.size
    return {int(row): int(arrays["labels"][row]) for row in [*first, 0, 1, 2]}


@pytest.fixture
def known(tmp_path, wrong):
    path = tmp_path / "known.csv"
    path.write_text("id,label\n" + "".join(f"{row},{NAMES[label]}\n" for row, label in wrong.items()))
    return path


def table(path):
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def array_of(wrong, n=40):
    known = np.full(n, -1)
    known[list(wrong)] = list(wrong.values())
    return known


@pytest.mark.parametrize("batches", [[], ["--batch-size", "8"], ["--batch-size", "8", "--shuffle"]])
def test_known_samples_keep_their_label_and_are_marked(moontide, features, tmp_path, known, wrong, batches):
    out = tmp_path / "p.csv"
    assert moontide("adapt", features, "--known", known, *batches, "--out", out)[0] == 0
    rows = table(out)
    assert [row["id"] for row in rows if row["known"] == "True"] == sorted(map(str, wrong), key=int)
    for row in rows:
        if row["known"] == "True":
            assert (int(row["label"]), float(row["confidence"])) == (wrong[int(row["id"])], 1.0)
    assert "unknown" in rows[0]


def test_known_labels_reach_the_method_and_are_not_counted_as_right(moontide, features, known, wrong, arrays, tasks):
    status, out, _ = moontide("adapt", features, "--known", known)
    assert status == 0
    np.testing.assert_array_equal(tasks[0].known, array_of(wrong))
    result = library.TIDE().fit_predict(tasks[0])
    rest = [i for i in range(40) if i not in wrong]
    accuracy = (result.labels[rest] == arrays["labels"][rest]).mean()
    assert f"known      {len(wrong)} of 40 labels, which are not counted below\n" in out
    assert f"zero-shot  100.00 %\nadapted    {100 * accuracy:.2f} %" in out  # what zero-shot has wrong is known
    assert f" of {len(rest)}: " in out


def test_where_all_labels_are_known_nothing_is_scored(moontide, features, tmp_path, arrays):
    np.savez(tmp_path / "k.npz", known=arrays["labels"])
    status, out, _ = moontide("adapt", features, "--known", tmp_path / "k.npz")
    assert (status, "adapted" in out, "changed    0 of 0" in out) == (0, False, True)


def test_a_class_balance_and_negatives_reach_the_method(moontide, features, tmp_path, arrays, tasks):
    (tmp_path / "p.json").write_text(json.dumps(dict(zip(NAMES, [4, 2, 1, 1], strict=True))))
    np.save(tmp_path / "n.npy", 2 * np.eye(3, 16))
    options = ["--class-prior", tmp_path / "p.json", "--negatives", tmp_path / "n.npy"]
    assert moontide("adapt", features, *options)[0] == 0
    np.testing.assert_allclose(tasks[0].class_prior, [0.5, 0.25, 0.125, 0.125])
    np.testing.assert_allclose(tasks[0].negatives, np.eye(3, 16))
    tasks.clear()
    assert moontide("adapt", features, *options, "--batch-size", "16")[0] == 0
    assert [(task.n, task.class_prior is not None, len(task.negatives)) for task in tasks] == [
        (16, True, 3),
        (16, True, 3),
        (8, True, 3),
    ]


def test_a_stream_takes_them_too(moontide, features, tmp_path, known, wrong, monkeypatch):
    (tmp_path / "p.csv").write_text("class,share\nant,1\nbee,1\ncat,1\ndog,5\n")
    np.save(tmp_path / "n.npy", np.eye(3, 16))
    started = []
    for kind in (OnlineMethod, PerBatch, library.TIDE):
        if "start" in vars(kind):
            start = kind.start
            monkeypatch.setattr(
                kind, "start", lambda self, task, start=start: started.append(task) or start(self, task)
            )
    options = ["--known", known, "--class-prior", tmp_path / "p.csv", "--negatives", tmp_path / "n.npy"]
    arguments = ["--batch-size", "7", "--drop-last", *options, "--out", tmp_path / "p.npz"]
    status, out, _ = moontide("stream", features, *arguments)
    assert status == 0
    np.testing.assert_allclose(started[0].class_prior, [0.125, 0.125, 0.125, 0.625])
    np.testing.assert_allclose(started[0].negatives, np.eye(3, 16))
    _, expected = run_stream(library.TIDE(), started[0], 7, drop_last=True)
    with np.load(tmp_path / "p.npz", allow_pickle=False) as held:
        np.testing.assert_array_equal(held["probs"], expected.probs)
        np.testing.assert_array_equal(held["known"], array_of(wrong)[:35] >= 0)
        np.testing.assert_array_equal(held["labels"][held["known"]], array_of(wrong)[:35][held["known"]])
    assert f"known      {sum(row < 35 for row in wrong)} of 35 labels" in out


def test_groups_are_labelled_on_their_own_and_written_in_file_order(moontide, arrays, tmp_path):
    camera = np.asarray([f"cam {i % 3}" for i in range(40)])
    np.savez(tmp_path / "f.npz", **arrays, camera=camera, logit_scale=20.0)
    status, out, err = moontide("adapt", tmp_path / "f.npz", "--group-by", "camera", "--out", tmp_path / "p.csv")
    assert status == 0
    assert err.startswith("tide: 40 samples in 3 groups, ")
    task, labels, _ = read_task(tmp_path / "f.npz")
    expected = np.empty(40, dtype=int)
    for i in range(3):
        rows = np.arange(i, 40, 3)
        expected[rows] = library.TIDE().fit_predict(task.features[rows], task.text, logit_scale=20.0).labels
        right = (expected[rows] == labels[rows]).mean()
        assert f"group cam {i}: {len(rows)} samples, " in out
        assert f"to {100 * right:.2f} %\n" in out
    rows = table(tmp_path / "p.csv")
    assert [int(row["label"]) for row in rows] == expected.tolist()
    assert [row["group"] for row in rows] == camera.tolist()
    assert f"adapted    {100 * (expected == labels).mean():.2f} %" in out


def test_groups_and_batches_go_together(moontide, arrays, tmp_path, tasks):
    np.savez(tmp_path / "f.npz", **arrays, camera=np.arange(40) % 2)
    status, _, err = moontide("adapt", tmp_path / "f.npz", "--group-by", "camera", "--batch-size", "12")
    assert status == 0
    assert err.startswith("tide: 40 samples in 2 groups and 4 batches, ")
    assert [task.n for task in tasks] == [12, 8, 12, 8]


def test_only_the_first_groups_are_printed(moontide, arrays, tmp_path):
    np.savez(tmp_path / "f.npz", **arrays, camera=np.arange(40) // 2 + 10)
    _, out, _ = moontide("adapt", tmp_path / "f.npz", "--group-by", "camera")
    assert out.count("group ") == 20
    np.savez(tmp_path / "f.npz", **arrays, camera=np.arange(40))
    _, out, _ = moontide("adapt", tmp_path / "f.npz", "--group-by", "camera")
    assert (out.count("group "), "and 20 more groups\n" in out) == (20, True)


def test_known_labels_follow_their_samples_into_groups_and_shuffled_batches(arrays, wrong):
    task = library.Task(arrays["image_features"], arrays["text_features"], 20.0, known=array_of(wrong))
    groups = [f"{i % 3}" for i in range(40)]
    for seed in (None, 4):
        result = run_groups(library.TIDE(), task, groups, 5, shuffle_seed=seed)
        np.testing.assert_array_equal(result.labels[list(wrong)], list(wrong.values()))
        alone = library.method("zero_shot").fit_predict(task.features, task.text, logit_scale=20.0)
        np.testing.assert_allclose(result.zero_shot, alone.probs, atol=1e-5)


def test_every_row_is_in_one_part_and_parts_do_not_mix_groups():
    rng = np.random.default_rng(0)
    groups = [str(g) for g in rng.integers(6, size=50)]
    for size, seed in ((None, None), (4, None), (4, 1)):
        parts = split_rows(50, groups, size, seed)
        assert sorted(np.concatenate(parts).tolist()) == list(range(50))
        assert all(len({groups[i] for i in part}) == 1 for part in parts)
        assert all(len(part) <= (size or 50) for part in parts)
        if seed is None:
            assert all(np.all(np.diff(part) > 0) for part in parts)


def test_groups_are_compared_without_known_samples(arrays, wrong):
    task = library.Task(arrays["image_features"], arrays["text_features"], 20.0, known=array_of(wrong))
    groups = ["a"] * 20 + ["b"] * 20
    found = compare_groups(arrays["labels"], library.TIDE().fit_predict(task), groups, scored_rows(task))
    assert [one.samples for one in found.values()] == [
        20 - sum(r < 20 for r in wrong),
        20 - sum(r >= 20 for r in wrong),
    ]
    assert [one.zero_shot_accuracy for one in found.values()] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--known", "known.csv", "--method", "moon"], "The method moon cannot use known labels ('known')"),
        (["--class-prior", "p.csv", "--method", "stata"], "cannot use a class balance"),
        (["--negatives", "n.npy", "--method", "zero_shot"], "cannot use negative names"),
        (["--known", "nowhere.csv"], "There is no file nowhere.csv"),
        (["--known", "known.csv", "--out", "known.csv"], "is also an input of this command"),
        (["--negatives", "n.npy"], "'negatives' must have the dimension of the text features, 16. Got 4 instead"),
        (["--group-by", "camera"], "has no array 'camera'"),
        (["--group-by", "folder"], "has no ids, and therefore no folders"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(moontide, features, known, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    np.save("n.npy", np.eye(4))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    status, out, err = moontide("adapt", features, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--known", "k.csv"], "'--known' does not work with shards"),
        (["--class-prior", "p.csv"], "The method moon cannot use a class balance"),
        (["--group-by", "camera"], "do not work with shards"),
    ],
)
def test_shards_refuse_them(moontide, tmp_path, option, words):
    (tmp_path / "shards").mkdir()
    status, _, err = moontide("adapt", tmp_path / "shards", "--method", "moon", *option)
    assert (status, err.count("\n")) == (2, 1)
    assert words in err


def test_a_state_has_its_own_class_balance(moontide, features, tmp_path):
    state = tmp_path / "s.safetensors"
    assert moontide("stream", features, "--save-state", state)[0] == 0
    (tmp_path / "p.csv").write_text("class,share\nant,1\nbee,1\ncat,1\ndog,5\n")
    status, _, err = moontide("stream", features, "--resume", state, "--class-prior", tmp_path / "p.csv")
    assert status == 2
    assert "are part of a state; do not use them" in err


def test_embeddings_are_checked_and_scaled_once(moontide, features, known, monkeypatch):
    made = []
    check = library.Task.__post_init__
    monkeypatch.setattr(library.Task, "__post_init__", lambda self: made.append(self) or check(self))
    assert moontide("adapt", features, "--known", known)[0] == 0
    assert len(made) == 1
