import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from moontide.bench import runner
from moontide.bench.data import read_pack
from moontide.bench.processes import in_processes
from moontide.bench.records import key, read_records
from moontide.bench.runner import run_suite, score
from moontide.bench.suites import load_suite
from moontide.errors import OptionError
from moontide.metrics import expected_calibration_error
from moontide.registry import method
from moontide.report.bench import write_report
from moontide.report.results import collect
from moontide.samplers import rng_for

METHODS = ["zero_shot", "moon"]


def results(folder):
    """Records by key, without what differs from one machine or moment to another."""
    return {
        key(r): {name: value for name, value in r.items() if name not in ("seconds", "environment")}
        for r in read_records(folder)
    }


def run(features, out, suite="batch-64", runs=4, methods=METHODS, **options):
    return run_suite(load_suite(suite).choose(methods).shorten(runs), features, out, **options)


def test_a_record_says_all_that_a_run_is_known_by(features, tmp_path):
    run(features, tmp_path / "out", runs=1)
    records = [r for r in read_records(tmp_path / "out") if r["method"] == "moon"]
    assert len(records) == 3
    record = records[0]
    pack = read_pack(features / "toy_vitb32.npz")
    assert record["features"] == pack.hash
    assert (record["dataset"], record["backbone"], record["samples"], record["classes"]) == (
        "toy",
        "clip_vit_b32",
        300,
        6,
    )
    assert record["seed"] == ["batch-64", "toy", "batch-64-very_low", 0]
    assert {"moontide", "commit", "python", "numpy", "torch", "machine"} == set(record["environment"])
    (indices,) = load_suite("batch-64").scenarios[0].batches("toy", pack.labels, 0)
    sampler = load_suite("batch-64").scenarios[0].sampler
    assert np.array_equal(indices, sampler.draw(pack.labels, rng_for(*record["seed"])))
    right = method("moon").fit_predict(pack.task(indices)).labels == pack.labels[indices]
    assert (record["n"], record["correct"]) == (len(indices), int(right.sum()))
    assert record["accuracy"] == pytest.approx(right.mean(), abs=1e-6)
    confidence = method("moon").fit_predict(pack.task(indices)).confidence
    error = expected_calibration_error(right, np.ones_like(right), confidence)
    assert np.abs(record["gaps"]).sum() / record["n"] == pytest.approx(error, abs=1e-6)
    assert record["seconds"] > 0


def test_suites_that_include_a_scenario_draw_its_batches(features, tmp_path):
    for suite in ("batch-64", "ablation"):
        run(features, tmp_path / suite, suite=suite, runs=1)
    own, ablation = (
        {
            r["scenario"]["id"]: r["accuracy"]
            for r in read_records(tmp_path / suite)
            if (r["method"], r["options"]) == ("moon", {})
        }
        for suite in ("batch-64", "ablation")
    )
    assert own.items() <= ablation.items()


def test_an_infinite_option_is_written_found_again_and_reported(features, tmp_path):
    path = tmp_path / "caps.toml"
    path.write_text(
        'version = 1\ntitle = "Caps"\ninclude = ["batch-64/low"]\nruns = 2\nmethods = ["zero_shot"]\n'
        '[[method]]\nname = "moon"\npreset = "paper"\nlabel = "the text"\n'
        '[[method]]\nname = "moon"\nsweep = { kappa_cap = [500.0, inf] }\n'
    )
    suite = load_suite(str(path))
    first, again = (run_suite(suite, features, tmp_path / "out") for _ in range(2))
    assert (first.written, dict(first.failed), again.written, again.found) == (8, {}, 0, 8)
    written = [r["options"] for r in read_records(tmp_path / "out") if r["vary"]]
    assert sorted(map(str, written)) == ["{'kappa_cap': 'inf'}"] * 2 + ["{'kappa_cap': 500.0}"] * 2
    assert {r["options"]["temper"] for r in read_records(tmp_path / "out") if r["label"]} == {1.0}
    (page, *_) = write_report(tmp_path / "out", tmp_path / "report")
    assert "the text" in page.read_text()


def test_scenarios_and_methods_are_reported_in_the_order_of_the_suite(features, tmp_path):
    run(features, tmp_path, suite="ablation", runs=1, methods=None)
    for path in tmp_path.glob("*.jsonl"):  # as several processes may have written them
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    tables = collect(tmp_path).tables
    suite = load_suite("ablation")
    assert [t.scenario["id"] for t in tables] == [s.id for s in suite.scenarios]
    assert [row.title for row in tables[0].rows[2:]] == [e.label for e in suite.entries[2:]]


def test_all_methods_meet_the_same_batches(features, tmp_path):
    run(features, tmp_path, methods=["zero_shot", "moon", "stata"])
    by_run = {}
    for record in read_records(tmp_path):
        by_run.setdefault((record["scenario"]["id"], record["run"]), []).append(record)
    assert len(by_run) == 12
    for records in by_run.values():
        assert len({(r["n"], r["zero_shot"]) for r in records}) == 1
        assert records[0]["accuracy"] == records[0]["zero_shot"]  # the first is zero-shot itself


def test_a_second_call_runs_only_what_is_missing(features, tmp_path):
    first = run(features, tmp_path, runs=2)
    more_methods = run(features, tmp_path, runs=2, methods=[*METHODS, "stata"])
    more_runs = run(features, tmp_path, runs=3)
    assert (first.written, first.found) == (12, 0)
    assert (more_methods.written, more_methods.found) == (6, 12)
    assert (more_runs.written, more_runs.found) == (6, 12)
    assert len(list(read_records(tmp_path))) == len(results(tmp_path)) == 24


def test_processes_give_the_same_results_as_one(features, tmp_path):
    run(features, tmp_path / "one")
    run(features, tmp_path / "two", jobs=2)
    assert results(tmp_path / "one") == results(tmp_path / "two")
    assert 1 <= len(list((tmp_path / "two").glob("*.jsonl"))) <= 2


def test_workers_compute_on_one_thread_and_the_caller_is_left_as_it_was(features, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    plugin = tmp_path / "sitecustomize.py"  # runs at the start of every worker, before numpy
    plugin.write_text(
        "import os, pathlib\n"
        f"pathlib.Path({str(tmp_path)!r}, f'threads-{{os.getpid()}}').write_text(os.environ['OPENBLAS_NUM_THREADS'])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run(features, tmp_path / "out", runs=1, jobs=2)
    seen = [path.read_text() for path in tmp_path.glob("threads-*")]
    assert len(seen) >= 2
    assert set(seen) == {"1"}
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert "OPENBLAS_NUM_THREADS" not in os.environ


@pytest.mark.parametrize(("compiles", "before"), [(True, 3 * 2), (False, 2)])
def test_no_time_has_compilation_or_imports_in_it(features, tmp_path, monkeypatch, compiles, before):
    """Compiled loops are warmed up for each scenario, as they compile for shapes; else once for each method."""
    calls = []
    monkeypatch.setattr(runner, "score", lambda *given: calls.append(given) or score(*given))
    monkeypatch.setattr(runner, "find_spec", lambda name: compiles or None)
    monkeypatch.setattr(runner, "_warm", set())
    outcome = run(features, tmp_path, methods=["zero_shot", "moon"], runs=2)
    assert outcome.written == 3 * 2 * 2
    assert len(calls) == outcome.written + before


@pytest.mark.parametrize("name", ["moon", "tda"])
def test_a_stream_starts_afresh_in_every_run_and_carries_state_only_where_the_method_does(features, name):
    pack = read_pack(features / "toy_vitb32.npz")
    batches = load_suite("online-128").scenarios[0].batches("toy", pack.labels, 0)
    assert [len(batch) for batch in batches] == [128, 128]  # 300 = 2 x 128 + 44: the rest is dropped, as published
    first, again = (score(method(name), pack, batches, "online") for _ in range(2))
    assert first["batches"] == again["batches"]
    assert first["accuracy"] == pytest.approx(np.mean(first["batches"]), abs=1e-6)
    alone = [score(method(name), pack, [batch], "online")["batches"][0] for batch in batches]
    assert first["batches"][0] == alone[0]
    if name == "moon":
        assert first["batches"] == alone


def test_accuracy_is_the_mean_over_batches(features):
    pack = read_pack(features / "toy_vitb32.npz")
    batches = [np.arange(10), np.arange(10, 100)]
    scores = score(method("zero_shot"), pack, batches, "online")
    right = method("zero_shot").fit_predict(pack.task(np.arange(100))).labels == pack.labels[:100]
    assert scores["accuracy"] == pytest.approx((right[:10].mean() + right[10:].mean()) / 2, abs=1e-6)
    assert (scores["correct"], scores["n"]) == (right.sum(), 100)


def test_what_cannot_run_is_listed_with_a_reason(features, tmp_path):
    np.savez(features / "bare.npz", image_features=np.eye(2), text_features=np.eye(2))
    labels = np.asarray([0, 1])
    np.savez(features / "tiny.npz", image_features=np.eye(2), text_features=np.eye(2), labels=labels)
    outcome = run(features, tmp_path / "out", suite="online-128", runs=1, methods=["moon", "mta"])
    assert outcome.written == 4
    message = " ".join(outcome.skipped)
    assert "bare.npz has no labels" in message
    assert "mta on toy: it needs views." in message
    assert "online-128-low on tiny: 'batch_size' is 128 but the stream has 2 samples" in message


def test_methods_that_need_views_run_where_there_are_some(features, tmp_path):
    held = dict(np.load(features / "toy_vitb32.npz"))
    noise = 0.1 * np.random.default_rng(0).normal(size=(300, 4, 16))
    views = np.concatenate([held["image_features"][:, None], held["image_features"][:, None] + noise], axis=1)
    np.savez(tmp_path / "views.npz", **held, view_features=views)
    for suite, records in (("batch-64", 3), ("online-128", 4)):
        outcome = run(tmp_path / "views.npz", tmp_path / "out", suite=suite, runs=1, methods=["mta"])
        assert (outcome.written, outcome.skipped, dict(outcome.failed)) == (records, [], {})


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the worker processes under /proc")
def test_a_worker_that_is_killed_is_reported_and_nothing_is_lost(features, tmp_path):
    process = start_and_wait(features, tmp_path / "out", 10, "--jobs", 2)
    worker = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[-1]
    os.kill(int(worker), signal.SIGKILL)
    message = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert "error: A worker process was killed" in message
    outcome = run(features, tmp_path / "out", runs=60)
    assert outcome.found >= 10
    assert outcome.found + outcome.written == 360


def test_a_method_that_fails_does_not_stop_the_others(features, tmp_path, monkeypatch):
    def fail(self, task):
        raise ZeroDivisionError("no luck")

    monkeypatch.setattr(type(method("moon")), "_fit", fail)
    outcome = run(features, tmp_path)
    assert outcome.written == 12
    assert outcome.failed == {
        f"moon on toy, batch-64-{s}: ZeroDivisionError('no luck')": 4 for s in ("very_low", "low", "medium")
    }


def test_time_is_measured_with_nothing_beside_it(features, tmp_path):
    with pytest.raises(OptionError, match="The suite runtime measures time"):
        run(features, tmp_path, suite="runtime", jobs=2)
    with pytest.raises(OptionError, match="'jobs' must be at least 1"):
        run(features, tmp_path, jobs=0)
    outcome = run(features, tmp_path, suite="runtime", runs=2)
    assert outcome.written == 12
    assert {r["n"] for r in read_records(tmp_path)} == {128, 300}


def command(features, out, *more):
    # a job in the background is started with SIGINT ignored
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{start}; from moontide.cli import main; sys.exit(main())"
    arguments = [
        "bench",
        "run",
        "batch-64",
        "--data",
        features,
        "--methods",
        "zero_shot,moon",
        "--runs",
        60,
        "--out",
        out,
    ]
    return [sys.executable, "-c", code, *map(str, arguments), *map(str, more)]


def start_and_wait(features, out, lines, *more):
    """Start a run in another process and return it once it has written some lines."""
    process = subprocess.Popen(command(features, out, *more), stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while sum(path.read_bytes().count(b"\n") for path in Path(out).glob("*.jsonl")) < lines:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.005)
    return process


def test_kill_9_loses_at_most_the_run_in_flight(features, tmp_path):
    process = start_and_wait(features, tmp_path / "out", 40)
    process.kill()
    process.communicate()
    survived = list(read_records(tmp_path / "out"))
    assert 40 <= len(survived) < 360
    order = [(s, r, m) for s in ("very_low", "low", "medium") for r in range(60) for m in METHODS]
    assert [(r["scenario"]["name"], r["run"], r["method"]) for r in survived] == order[: len(survived)]
    outcome = run(features, tmp_path / "out", runs=60)
    assert (outcome.found, outcome.written) == (len(survived), 360 - len(survived))
    run(features, tmp_path / "whole", runs=60)
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    assert len(list(read_records(tmp_path / "out"))) == 360


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the worker processes under /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_process_that_started_them(features, tmp_path, how):
    process = start_and_wait(features, tmp_path / "out", 10, "--jobs", 2)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(workers) >= 2
    process.send_signal(how)
    message = process.communicate(timeout=60)[1]
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert message.splitlines()[-1] == "error: interrupted"
        assert "Traceback" not in message
    end = time.monotonic() + 60
    while any(alive(worker) for worker in workers):
        assert time.monotonic() < end
        time.sleep(0.02)
    for path in (tmp_path / "out").glob("*.jsonl"):
        assert all(json.loads(line)["suite"] == "batch-64" for line in path.read_bytes().split(b"\n")[:-1])


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals of another kind")
def test_ctrl_c_does_not_reach_the_workers_not_even_while_they_load():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    (blocked,) = in_processes(partial(signal.pthread_sigmask, signal.SIG_BLOCK), [()], 1)
    assert signal.SIGINT in blocked
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
