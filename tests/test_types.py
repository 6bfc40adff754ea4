"""Tasks and results: what is checked on entry, in which words, and what comes back."""

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moontide
from moontide.core.graph import Graph, nearest_neighbours
from moontide.errors import InputError, MissingInputError, MoontideError, ResourceError, UnknownNameError
from moontide.methods.zero_shot import ZeroShot
from moontide.protocols import NONE, PerBatch, as_online, given_shares, samples
from moontide.types import Result, Task

RNG = np.random.default_rng(0)
FEATURES, TEXT = RNG.normal(size=(6, 4)), RNG.normal(size=(3, 4))


def test_a_task_holds_unit_rows_of_one_kind() -> None:
    task = Task(FEATURES.astype("float32"), torch.asarray(TEXT))
    for x in (task.features, task.text):
        assert isinstance(x, np.ndarray)
        assert x.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, rtol=1e-6)
    on_torch = Task(torch.asarray(FEATURES), TEXT)
    assert on_torch.text.dtype == torch.float64
    assert (task.n, task.k, task.d) == (6, 3, 4)


def test_a_task_has_no_labels_and_cannot_be_changed() -> None:
    assert not [f.name for f in fields(Task) if "label" in f.name]
    with pytest.raises(FrozenInstanceError):
        Task(FEATURES, TEXT).logit_scale = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"features": FEATURES[0]}, "'image_features' must be a 2-D array. Got 1-D"),
        ({"text": TEXT[:0]}, "'text_features' must not be empty"),
        ({"text": TEXT[:, :3]}, "must have the same dimension. Got 4 and 3 instead; do they come from the same model"),
        (
            {"features": np.where(np.arange(6)[:, None] == 2, np.nan, FEATURES)},
            "'image_features' .* NaN or infinity in row 2;",
        ),
        ({"text": TEXT * [[1], [0], [1]]}, r"'text_features' must not have all-zero rows.* [Rr]ow 1\b"),
        ({"logit_scale": 0.0}, "'logit_scale' must be a positive number .* Got 0.0 instead"),
        ({"logit_scale": -5}, "'logit_scale' .* Got -5 instead"),
        ({"logit_scale": float("nan")}, "'logit_scale' .* Got nan instead"),
        ({"logit_scale": float("inf")}, "'logit_scale' .* Got inf instead"),
        ({"logit_scale": 1e300}, "'logit_scale' must be a positive number up to 1e\\+08 .* Got 1e\\+300 instead"),
        ({"logit_scale": 10**400}, "'logit_scale' must be a positive number .* Got 1000"),
        ({"logit_scale": "large"}, "'logit_scale' .* Got large instead"),
        ({"class_names": ["cat", "dog"]}, "'class_names' must have one name for each of the 3 rows .* Got 2."),
        ({"graph": Graph(np.zeros((2, 1), int), np.zeros((2, 1)))}, r"'graph' must have one row per sample \(6\)"),
        ({"extras": {"views": np.ones((5, 2, 4))}}, r"'views' must have one row per sample \(6\). Got 5 instead"),
        ({"extras": {"images": [None] * 7}}, r"'images' must have one row per sample \(6\). Got 7 instead"),
        ({"known": [0, 1]}, r"'known' must have one entry for each of the 6 samples. Got shape \(2,\) instead"),
        ({"known": np.zeros(6)}, "'known' must be integers, class numbers from 0, or -1 .* Got dtype float64 instead"),
        ({"known": [0, 1, 2, 3, -1, -1]}, "'known' must be class numbers from 0 to 2, or -1 .* Got 3 in row 3"),
        ({"known": [0, 1, 2, -2, -1, -1]}, "'known' must be class numbers from 0 to 2, or -1 .* Got -2 in row 3"),
        ({"class_prior": [1, 2]}, "'class_prior' must have one share for each of the 3 classes. Got 2"),
        ({"class_prior": [1, -2, 3]}, "'class_prior' must be shares of at least 0, not all of them 0. Got a negative"),
        ({"class_prior": [0, 0, 0]}, "'class_prior' must be shares of at least 0, not all of them 0"),
        ({"class_prior": [1, np.nan, 0]}, "'class_prior' must be finite"),
        ({"negatives": TEXT[:, :3]}, "'negatives' must have the dimension of the text features, 4. Got 3 instead"),
        ({"negatives": 0 * TEXT}, "'negatives' must not have all-zero rows"),
        ({"negatives": TEXT[:0]}, "'negatives' must not be empty"),
    ],
)
def test_a_bad_task_is_refused_in_words(change: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Task(**{"features": FEATURES, "text": TEXT, **change})


def test_errors_are_of_one_tree_and_of_the_built_in_kind() -> None:
    with pytest.raises(MoontideError):
        Task(FEATURES[0], TEXT)
    with pytest.raises(ValueError, match="2-D"):
        Task(FEATURES[0], TEXT)


def test_class_names_that_appear_twice_are_only_warned_about() -> None:
    with pytest.warns(UserWarning, match="more than once: cat"):
        task = Task(FEATURES, TEXT, class_names=["cat", "dog", "cat"])
    assert task.class_names == ("cat", "dog", "cat")


def test_tasks_are_cut_in_file_order() -> None:
    graph = nearest_neighbours(FEATURES, 1)
    task = Task(FEATURES, TEXT, 50.0, ("a", "b", "c"), graph, {"views": np.ones((6, 2, 4)), "encoder": "e"})
    parts = list(task.batches(4))
    assert [part.n for part in parts] == [4, 2]
    np.testing.assert_allclose(np.concatenate([part.features for part in parts]), task.features, rtol=1e-15)
    assert parts[1].extras["views"].shape == (2, 2, 4)
    assert parts[1].extras["encoder"] == "e"
    assert parts[1].graph is None
    assert parts[1].logit_scale == 50.0
    assert parts[1].class_names == ("a", "b", "c")


def test_a_result_answers_by_its_scores() -> None:
    probs = np.asarray([[0.6, 0.4], [0.3, 0.7]])
    result = Result(probs, probs[:, ::-1], native_scores=np.asarray([[1.0, 2.0], [0.0, 3.0]]))
    np.testing.assert_array_equal(result.labels, [1, 1])
    np.testing.assert_array_equal(result.zero_shot_labels, [1, 0])
    np.testing.assert_array_equal(result.changed, [False, True])
    np.testing.assert_array_equal(result.confidence, [0.4, 0.7])
    np.testing.assert_array_equal(replace(result, native_scores=None).labels, [0, 1])


def test_results_are_joined() -> None:
    probs = np.asarray([[0.6, 0.4]])
    one = Result(probs, probs, native_scores=2 * probs, n_iter=3, converged=False, kappa=np.ones(2))
    assert Result.concatenate([one]) is one
    joined = Result.concatenate([one, replace(one, n_iter=4, converged=True)])
    np.testing.assert_array_equal(joined.scores, 2 * np.concatenate([probs, probs]))
    assert (joined.n_iter, joined.converged, joined.kappa) == (4, False, None)


def test_fit_predict_takes_arrays_or_a_task() -> None:
    by_arrays = ZeroShot().fit_predict(FEATURES, TEXT, logit_scale=30.0)
    np.testing.assert_array_equal(by_arrays.probs, ZeroShot().fit_predict(Task(FEATURES, TEXT, 30.0)).probs)
    with pytest.raises(InputError, match="'text_features' is missing: pass the embeddings of the class names"):
        ZeroShot().fit_predict(FEATURES)
    with pytest.raises(UnknownNameError, match="There is no input 'label'"):
        ZeroShot().fit_predict(FEATURES, TEXT, label=[0])


def test_what_is_given_beside_features_is_checked_and_scaled() -> None:
    for kind, dtype in ((np.asarray, "float32"), (torch.asarray, "float64")):
        features = kind(FEATURES.astype(dtype))
        task = Task(features, TEXT, known=[0, -1, 2, -1, -1, 1], class_prior=[1, 3, 0], negatives=5 * TEXT[:2])
        assert type(task.known) is type(task.class_prior) is type(task.negatives) is type(features)
        assert task.known.tolist() == [0, -1, 2, -1, -1, 1]
        assert task.class_prior.tolist() == [0.25, 0.75, 0]
        assert task.class_prior.dtype == task.negatives.dtype == features.dtype
        np.testing.assert_allclose(np.linalg.norm(np.asarray(task.negatives), axis=1), 1, rtol=1e-6)


def test_known_labels_go_with_their_samples_and_the_rest_with_every_part() -> None:
    task = Task(FEATURES, TEXT, known=[0, -1, 2, -1, -1, 1], class_prior=[1, 3, 0], negatives=TEXT)
    assert task.rows(1, 3).known.tolist() == [-1, 2]
    assert task.take([5, 0]).known.tolist() == [1, 0]
    assert [part.known.tolist() for part in task.batches(4)] == [[0, -1, 2, -1], [-1, 1]]
    np.testing.assert_allclose(task.rows(1, 3).class_prior, task.class_prior, rtol=1e-12)
    np.testing.assert_allclose(task.take([5]).negatives, task.negatives, rtol=1e-12)


GIVEN = {"known": [0, -1, 2, -1, -1, 1], "class_prior": [1, 3, 1], "negatives": -TEXT}


@pytest.mark.parametrize("name", moontide.method_names())
@pytest.mark.parametrize("what", GIVEN)
def test_a_method_uses_what_it_is_given_or_says_that_it_cannot(name: str, what: str) -> None:
    method = moontide.method(name)
    if what in method.accepts:
        found, plain = method.fit_predict(FEATURES, TEXT, **{what: GIVEN[what]}), method.fit_predict(FEATURES, TEXT)
        same = np.array_equal(found.probs, plain.probs) and np.array_equal(found.unknown, plain.unknown)
        assert not same
        return
    calls = [lambda: method.fit_predict(FEATURES, TEXT, **{what: GIVEN[what]})]
    if not method.needs:
        online = as_online(method)
        begin = {what: GIVEN[what]}
        calls.append(
            (lambda: online.step(online.start(Task(FEATURES, TEXT)), FEATURES, GIVEN["known"]))
            if what == "known"
            else (lambda: moontide.Stream(name, TEXT, **begin))
        )
    for call in calls:
        with pytest.raises(InputError) as refused:
            call()
        message = str(refused.value)
        assert message.startswith(f"The method {name} cannot use ")
        assert f"('{what}')" in message
        assert message.endswith("or use tide.")
        assert (message.count(". "), len(message) <= 300) == (0, True)


def test_a_correction_is_refused_by_methods_that_cannot_use_it() -> None:
    stream = moontide.Stream("tda", TEXT)
    stream.push(FEATURES)
    with pytest.raises(InputError, match=r"The method tda cannot use known labels \('known'\): .* or use tide\.$"):
        stream.correct(FEATURES[:1], [0])


@given(values=st.lists(st.floats(0, 10), min_size=1, max_size=6), none=st.integers(0, 4))
def test_classes_without_a_share_get_the_average_one(values: list[float], none: int) -> None:
    prior = np.asarray([*values, *[NONE] * none])
    shares = given_shares(prior)
    if not sum(values):
        assert shares is None
    elif sum(values) > 1e-3:
        assert shares.sum() == pytest.approx(1)
        np.testing.assert_allclose(shares[len(values) :], 1 / len(prior), atol=1e-9)
        kept = shares[: len(values)]
        np.testing.assert_allclose(kept * sum(values), np.asarray(values) * kept.sum(), atol=1e-9)


def test_what_a_method_needs_is_asked_for_in_words() -> None:
    class Needy(ZeroShot):
        needs = frozenset({"views", "encoder"})

    with pytest.raises(MissingInputError, match=r"needs the image encoder: pass encoder=... and augmented views"):
        Needy().fit_predict(FEATURES, TEXT)


def test_a_run_that_cannot_fit_into_memory_is_refused_before_it_starts() -> None:
    class Huge(ZeroShot):
        def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
            return 10**18

    with pytest.raises(ResourceError, match=r"on 6 x 3 needs about 909494.7 TiB of memory, and .* is available"):
        Huge().fit_predict(FEATURES, TEXT)


def test_a_batch_method_runs_on_a_stream() -> None:
    moon = moontide.method("moon")
    online = as_online(moon)
    assert isinstance(online, PerBatch)
    assert as_online(online) is online
    assert online.name == "moon"
    task = Task(FEATURES, TEXT)
    state, result = online.step(online.start(task), samples(online, task))
    np.testing.assert_allclose(result.probs, moon.fit_predict(task).probs, rtol=1e-12)
    assert state.seen == 6


def test_a_step_checks_its_samples() -> None:
    online = PerBatch(ZeroShot())
    state = online.start(Task(FEATURES, TEXT))
    with pytest.raises(InputError, match=r"'x' must have the dimension of the text features, 4. Got 3 instead"):
        online.step(state, FEATURES[:, :3])
    with pytest.raises(InputError, match=r"'x' must be finite.*\b[Rr]ow 0\b"):
        online.step(state, np.full((1, 4), np.nan))
    with pytest.raises(InputError, match="'x' must be a 2-D array"):
        online.step(state, FEATURES[0])


def test_a_printed_result_has_at_most_ten_lines_whatever_its_size() -> None:
    probs = np.random.default_rng(0).dirichlet(np.ones(50), size=5000)
    text = str(Result(probs, probs, unknown=probs[:, 0]))
    assert len(text.splitlines()) <= 10
    assert "5000 samples and 50 classes: 0 labels differ" in text


def test_a_result_becomes_a_pandas_table_with_names_and_ids() -> None:
    pytest.importorskip("pandas")
    result = moontide.TIDE().fit_predict(np.eye(3), np.eye(3), class_names=["a", "b", "c"])
    frame = result.to_pandas(["x", "y", "z"])
    assert list(frame.columns) == ["label", "class_name", "confidence", "zero_shot_label", "changed", "unknown"]
    assert frame["class_name"].to_dict() == {"x": "a", "y": "b", "z": "c"}


def test_rows_batches_and_micro_batches_are_not_normalised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(np.random.default_rng(0).normal(size=(6, 4)), np.eye(4), known=[-1, 0, 1, 2, 3, -1])
    online = as_online(moontide.method("moon"))
    state = online.start(task)

    def refuse(x: Any, name: str | None = None) -> Any:
        raise AssertionError("scaled again")

    monkeypatch.setattr("moontide.types.unit_rows", refuse)
    for part in (task.rows(1, 3), task.take([2, 0]), next(task.batches(2))):
        assert part.text is task.text
        assert part.graph is None
    np.testing.assert_array_equal(task.rows(1, 3).known, [0, 1])
    online.step(state, np.eye(4)[:2])
