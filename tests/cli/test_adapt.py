"""`moontide adapt` gives what the library gives."""

import contextlib
import os
import pty
import subprocess
import sys

import numpy as np
import pytest

import moontide as library
from moontide.evaluate import run_batches
from moontide.store.files import read_task


def labels_of(path):
    with np.load(path, allow_pickle=False) as held:
        return held["labels"]


def test_accuracy_before_and_after(moontide, features, arrays):
    task, labels, _ = read_task(features)
    result = library.TIDE().fit_predict(task)
    before, after = result.zero_shot_labels == labels, result.labels == labels
    assert before.any()
    assert result.changed.any()
    status, out, err = moontide("adapt", features)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        f"zero-shot  {100 * before.mean():.2f} %",
        f"adapted    {100 * after.mean():.2f} % ({100 * (after.mean() - before.mean()):+.2f})",
        f"changed    {result.changed.sum()} of 40: {(after & ~before).sum()} for better, "
        f"{(before & ~after).sum()} for worse, {(result.changed & ~before & ~after).sum()} sideways",
    ]


def test_without_labels_the_largest_classes(moontide, tmp_path, arrays):
    del arrays["labels"]
    np.savez(tmp_path / "f.npz", **arrays)
    result = library.TIDE().fit_predict(arrays["image_features"], arrays["text_features"])
    status, out, _ = moontide("adapt", tmp_path / "f.npz")
    share = np.bincount(result.labels, minlength=4) / 40
    assert status == 0
    assert f"changed    {result.changed.sum()} of 40\n" in out
    assert f"class {share.argmax()} {100 * share.max():.2f} %" in out
    assert "accuracy" not in out


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        (["--method", "zero_shot"], library.method("zero_shot")),
        (["--method", "moon", "--preset", "paper"], library.MOON.from_preset("paper")),
        (["--method", "moon", "--set", "beta=soft", "--set", "neighbours=5"], library.MOON(beta="soft", neighbours=5)),
        (
            ["--method", "moon", "--preset", "paper", "--set", "temper=20"],
            library.MOON.from_preset("paper", temper=20.0),
        ),
    ],
)
def test_methods_presets_and_options_reach_the_library(moontide, features, tmp_path, flags, chosen):
    status, _, err = moontide("adapt", features, *flags, "--out", tmp_path / "p.npz")
    assert (status, err) == (0, f"wrote {tmp_path / 'p.npz'}\n")
    expected = chosen.fit_predict(read_task(features).task)
    with np.load(tmp_path / "p.npz", allow_pickle=False) as held:
        for name in ("probs", "scores", "labels", "zero_shot_labels", "confidence"):
            np.testing.assert_array_equal(held[name], getattr(expected, name))


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_other_outputs(moontide, features, tmp_path, kind):
    assert moontide("adapt", features, "--out", tmp_path / f"p.{kind}")[0] == 0
    assert (tmp_path / f"p.{kind}").stat().st_size > 0


def test_batches_are_independent_and_end_with_one_line(moontide, features, tmp_path):
    status, _, err = moontide("adapt", features, "--batch-size", "16", "--out", tmp_path / "p.npz")
    task = read_task(features).task
    expected = [library.TIDE().fit_predict(task.rows(a, b)).labels for a, b in ((0, 16), (16, 32), (32, 40))]
    assert status == 0
    assert err.startswith("tide: 40 samples in 3 batches, ")
    assert len(err.splitlines()) == 2
    np.testing.assert_array_equal(labels_of(tmp_path / "p.npz"), np.concatenate(expected))


def test_shuffled_batches_are_written_in_file_order(moontide, features, tmp_path):
    order = np.random.default_rng(3).permutation(40)
    task = read_task(features).task
    expected = np.empty(40, dtype=int)
    for start in (0, 16, 32):
        rows = order[start : start + 16]
        batch = library.Task(task.features[rows], task.text, task.logit_scale)
        expected[rows] = library.TIDE().fit_predict(batch).labels
    arguments = ["--batch-size", "16", "--shuffle", "--seed", "3", "--out", tmp_path / "p.npz"]
    assert moontide("adapt", features, *arguments)[0] == 0
    np.testing.assert_array_equal(labels_of(tmp_path / "p.npz"), expected)
    unshuffled = run_batches(library.TIDE(), task, 16).labels
    assert (unshuffled != expected).any()


def test_shuffle_takes_views_and_native_scores_along(arrays):
    views = np.random.default_rng(1).normal(size=(40, 6, 16)).astype(np.float32)
    task = library.Task(arrays["image_features"], arrays["text_features"], extras={"views": views})
    for name in ("zero_shot", "mta"):
        whole = library.method(name).fit_predict(task)
        drawn = run_batches(library.method(name), task, 7, shuffle_seed=0)
        np.testing.assert_allclose(drawn.scores, whole.scores, rtol=1e-4, atol=1e-4)


def test_batches_of_torch_tensors(arrays):
    torch = pytest.importorskip("torch")
    image, text = arrays["image_features"], arrays["text_features"]
    for seed in (None, 0):
        ours = run_batches(library.MOON(), library.Task(image, text), 16, shuffle_seed=seed)
        tensors = library.Task(torch.from_numpy(image), torch.from_numpy(text))
        theirs = run_batches(library.MOON(), tensors, 16, shuffle_seed=seed)
        np.testing.assert_allclose(theirs.probs.numpy(), ours.probs, atol=1e-4)


def test_dtype(moontide, features, tmp_path):
    for dtype in ("float32", "float64"):
        assert moontide("adapt", features, "--dtype", dtype, "--out", tmp_path / "p.npz")[0] == 0
        with np.load(tmp_path / "p.npz", allow_pickle=False) as held:
            assert held["probs"].dtype == dtype


def test_cpu_runs_without_torch(features):
    code = f"""
import sys
from moontide.cli import main
assert main(["adapt", {str(features)!r}, "--device", "cpu"]) == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_cuda_gives_what_the_cpu_gives(moontide, features, tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for device in ("cpu", "cuda"):
        assert moontide("adapt", features, "--device", device, "--out", tmp_path / f"{device}.npz")[0] == 0
    np.testing.assert_array_equal(labels_of(tmp_path / "cpu.npz"), labels_of(tmp_path / "cuda.npz"))


def test_a_terminal_sees_a_bar(features):
    leader, follower = pty.openpty()
    code = "import sys; from moontide.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "adapt", str(features), "--batch-size", "4"]
    terminal = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=follower, env=terminal)
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # which is how a terminal says that the program has left
        while data := os.read(leader, 4096):
            shown += data
    os.close(leader)
    assert running.wait() == 0, shown
    assert b"40/40" in shown
    assert b"tide: 40 samples in 10 batches" in shown


def test_an_approximate_graph_says_how_good_it_is(moontide, tmp_path, arrays, monkeypatch):
    monkeypatch.setattr("moontide.core.graph.EXACT_ROWS", 20)
    monkeypatch.setattr("moontide.core.graph.LIST", 5)
    monkeypatch.setattr("moontide.core.graph.PROBES", 1)
    np.save(tmp_path / "f.npy", arrays["image_features"])
    np.save(tmp_path / "t.npy", arrays["text_features"])
    status, _, err = moontide("adapt", tmp_path / "f.npy", "--text", tmp_path / "t.npy", "--method", "moon")
    result = library.MOON().fit_predict(arrays["image_features"], arrays["text_features"])
    recall = result.details["graph"].recall
    assert status == 0
    assert recall < 1
    assert err == f"neighbours: approximate search, {100 * recall:.1f} % of the true ones found on a sample\n"
