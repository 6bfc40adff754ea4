"""`moontide stream`: a file in its order, cut and resumed."""

import numpy as np
import pytest
from safetensors.numpy import save_file

import moontide as library
from moontide.store.files import read_task
from moontide.streams import run_stream


def scores_of(path):
    with np.load(path, allow_pickle=False) as held:
        return held["scores"]


@pytest.mark.parametrize("name", ["moon", "tda"])
def test_a_stream_gives_what_the_library_gives(moontide, features, tmp_path, name):
    status, out, err = moontide("stream", features, "--method", name, "--batch-size", "16", "--out", tmp_path / "p.npz")
    _, expected = run_stream(library.method(name), read_task(features).task, 16)
    assert status == 0
    assert err.startswith(f"{name}: 40 samples in 3 batches, ")
    assert f"changed    {expected.changed.sum()} of 40: " in out
    with np.load(tmp_path / "p.npz", allow_pickle=False) as held:
        np.testing.assert_array_equal(held["scores"], expected.scores)
        np.testing.assert_array_equal(held["labels"], expected.labels)


def test_drop_last_leaves_out_the_remainder(moontide, features, tmp_path):
    arguments = ["--batch-size", "16", "--drop-last", "--out", tmp_path / "p.npz"]
    status, out, err = moontide("stream", features, *arguments)
    assert status == 0
    assert err.startswith("tide: 32 samples in 2 batches, ")
    assert " of 32: " in out
    assert scores_of(tmp_path / "p.npz").shape == (32, 4)


@pytest.mark.parametrize("flags", [["--method", "tda", "--set", "positive_capacity=2"], ["--method", "moon"]])
@pytest.mark.parametrize("again", [True, False], ids=["method named again", "method of the state"])
def test_a_resumed_stream_is_the_uncut_one(moontide, features, arrays, tmp_path, flags, again):
    for name, rows in (("first", slice(0, 16)), ("second", slice(16, 40))):
        part = {**arrays, "image_features": arrays["image_features"][rows], "labels": arrays["labels"][rows]}
        np.savez(tmp_path / f"{name}.npz", **part, logit_scale=20.0)
    state = tmp_path / "state.safetensors"
    common = ["--batch-size", "8", "--out"]
    assert moontide("stream", features, *flags, *common, tmp_path / "whole.npz")[0] == 0
    assert (
        moontide("stream", tmp_path / "first.npz", *flags, "--save-state", state, *common, tmp_path / "a.npz")[0] == 0
    )
    resumed = ["--resume", state, *(flags if again else []), "--save-state", state, "--out", tmp_path / "b.npz"]
    status, _, err = moontide("stream", tmp_path / "second.npz", *resumed)
    assert status == 0
    assert "the state after 40 samples" in err
    assert "24 samples in 3 batches" in err  # of 8, as the state says
    joined = np.concatenate([scores_of(tmp_path / "a.npz"), scores_of(tmp_path / "b.npz")])
    np.testing.assert_array_equal(joined, scores_of(tmp_path / "whole.npz"))


@pytest.fixture
def state(moontide, features, tmp_path):
    path = tmp_path / "state.safetensors"
    assert moontide("stream", features, "--method", "tda", "--save-state", path)[0] == 0
    return path


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--method", "moon"], "was made by tda with its defaults. Got moon with its defaults instead"),
        (["--set", "positive_capacity=5"], "Got tda with positive_capacity=5 instead"),
        (["--preset", "original"], "Got tda with access=sample, scores=logits instead"),
        (["--logit-scale", "7"], "'logit_scale' must be "),
        (["--batch-size", "0"], "'batch_size' must be an integer of at least 1"),
        (["--batch-size", "50", "--drop-last"], "leaves nothing of 40 samples"),
        (["--save-state", "state.npz"], "must end in .safetensors"),
        (["--out", "p.txt"], "must end in .npz"),
    ],
)
def test_what_does_not_go_with_a_state_is_refused(moontide, features, state, tmp_path, flags, words):
    before = sorted(tmp_path.iterdir())
    status, out, err = moontide("stream", features, "--resume", state, *flags)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert sorted(tmp_path.iterdir()) == before


def test_a_state_of_other_classes_is_refused(moontide, features, state, arrays, tmp_path):
    np.save(tmp_path / "text.npy", arrays["text_features"][::-1])
    status, _, err = moontide("stream", features, "--text", tmp_path / "text.npy", "--resume", state)
    assert status == 2
    assert "'text_features' must be those that the state was made with" in err


@pytest.mark.parametrize("content", ["missing", "rubbish", "another", "truncated", "folder"])
def test_a_file_that_is_no_state_is_refused(moontide, features, state, tmp_path, content):
    path = tmp_path / "other.safetensors"
    if content == "rubbish":
        path.write_bytes(b"rubbish " * 10)
    elif content == "another":
        save_file({"a": np.zeros(2)}, path)
    elif content == "truncated":
        path.write_bytes(state.read_bytes()[:-10])
    elif content == "folder":
        path.mkdir()
    status, out, err = moontide("stream", features, "--resume", path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert str(path) in err
