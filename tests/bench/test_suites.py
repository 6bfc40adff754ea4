import pytest

from moontide.bench.suites import Entry, load_suite, suite_names
from moontide.errors import FileError, OptionError, UnknownNameError
from moontide.registry import method_names

ISSUED = {
    "batch-64", "batch-1000", "online-128", "batch-sizes", "all-classes", "random-classes", "ablation", "alpha-design",
    "lambda-design", "beta", "variants", "sample-wise", "sensitivity", "convergence", "runtime", "backbones",
}  # fmt: skip


def test_every_experiment_of_the_paper_is_a_suite():
    assert set(suite_names()) >= ISSUED


@pytest.mark.parametrize("name", suite_names())
def test_suites_name_methods_that_exist_with_options_that_they_take(name):
    suite = load_suite(name)
    assert {entry.name for entry in suite.entries} <= set(method_names())
    for entry in suite.entries:
        made = entry.build()
        assert all(getattr(made, option) == value for option, value in entry.options.items())
    keys = [(entry.name, str(entry.options), entry.vary) for entry in suite.entries]
    assert len(set(keys)) == len(keys)


def test_scenarios_are_the_published_ones():
    def facts(name, *keys):
        return [tuple(s.facts().get(key) for key in keys) for s in load_suite(name).scenarios]

    assert facts("batch-64", "batch_size", "effective_classes") == [(64, (1, 4)), (64, (2, 10)), (64, (5, 25))]
    assert facts("batch-1000", "batch_size", "effective_classes") == [
        (1000, (5, 25)), (1000, (25, 50)), (1000, (50, 100)),
    ]  # fmt: skip
    assert facts("online-128", "kind", "xi", "batch_size") == [
        ("dirichlet", 0.1, 128), ("dirichlet", 0.01, 128), ("dirichlet", 0.001, 128), ("separate", None, 128),
    ]  # fmt: skip
    assert facts("batch-sizes", "batch_size") == [(128,), (128,), (256,), (256,), (500,), (500,)]
    assert facts("random-classes", "batch_size", "effective_classes") == [
        (size, "random") for size in (64, 128, 256, 500, 1000, 2000)
    ]
    assert facts("all-classes", "batch_size", "effective_classes") == [(None, None)]
    assert {s.runs for s in load_suite("batch-64").scenarios} == {1000}
    assert {s.runs for s in load_suite("online-128").scenarios} == {100}


def test_include_takes_all_scenarios_or_one_with_their_runs():
    assert [s.id for s in load_suite("sample-wise").scenarios] == ["online-128-medium"]
    variants = load_suite("variants")
    parts = [s for name in ("batch-64", "batch-1000", "online-128") for s in load_suite(name).scenarios]
    assert list(variants.scenarios) == parts


def test_methods_are_chosen_by_name_by_label_or_all():
    ablation = load_suite("ablation")
    assert [e.label for e in ablation.choose(["moon"]).entries] == [e.label for e in ablation.entries[1:]]
    assert [e.options for e in ablation.choose(["without alpha"]).entries] == [{"alpha": 1.0}]
    assert [e.options for e in ablation.choose(["stata"]).entries] == [{}]
    assert {e.name for e in ablation.choose(["all"]).entries} == set(method_names())
    assert len(ablation.choose(["all"]).entries) == len(ablation.entries) + len(method_names()) - 2
    with pytest.raises(UnknownNameError, match="Did you mean 'stata'"):
        ablation.choose(["statta"])
    with pytest.raises(OptionError, match="'runs' must be at least 1"):
        ablation.shorten(0)


def test_defaults_are_left_out_of_options_so_that_one_method_has_one_key():
    assert Entry.make("moon", {"beta": "hard", "alpha": 1.0}).options == {"alpha": 1.0}
    assert Entry.make("moon", {"iterations": 10}, vary="iterations").options == {"iterations": 10}


def test_a_suite_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'version = 3\ntitle = "Mine"\ninclude = ["batch-64/low"]\nruns = 7\n'
        '[[method]]\nname = "moon"\nsweep = { neighbours = [1, 3] }\n'
        '[[scenario]]\nname = "few"\nbatch_size = 8\neffective_classes = 2\n'
    )
    suite = load_suite(str(path))
    assert (suite.name, suite.version) == ("mine", 3)
    assert [(s.id, s.runs) for s in suite.scenarios] == [("batch-64-low", 7), ("batch-8-few", 7)]
    assert [(e.options, e.vary) for e in suite.entries] == [
        ({"neighbours": 1}, "neighbours"),
        ({"neighbours": 3}, "neighbours"),
    ]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("version = 1\n[[", FileError, "cannot be read"),
        ('title = "no version"\nmethods = ["moon"]\ninclude = ["batch-64"]', FileError, "not a suite"),
        ('version = 1\ntitle = "x"\nmethods = ["moon"]', FileError, "at least one method, and scenarios"),
        ('version = 1\ntitle = "x"\ninclude = ["batch-46"]', UnknownNameError, "Did you mean 'batch-64'"),
        ('version = 1\ntitle = "x"\ninclude = ["batch-64/high"]', UnknownNameError, "scenario of batch-64"),
        ('version = 1\ntitle = "x"\nmethod = 1\nrun = 3', UnknownNameError, "key of a suite 'run'"),
        ('version = 1\ntitle = "x"\nmethods = ["moon"]\n[[scenario]]\nname = "a"', FileError, "'runs' of the"),
    ],
)  # fmt: skip
def test_a_wrong_suite_gets_a_sentence(tmp_path, text, error, words):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(error, match=words):
        load_suite(str(path))
