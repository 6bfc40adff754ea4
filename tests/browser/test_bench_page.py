"""The report of a benchmark in a real browser: it needs nothing else, its figures show, and it fits the window."""

import numpy as np
import pytest

from moontide.bench.runner import run_suite
from moontide.bench.suites import load_suite
from moontide.report.bench import write_report
from moontide.report.paper import DATASETS


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report on eleven small made-up datasets under the names of the paper's."""
    folder = tmp_path_factory.mktemp("bench")
    rng = np.random.default_rng(0)
    (folder / "features").mkdir()
    for name in DATASETS:
        text = rng.normal(size=(5, 8))
        labels = np.repeat(np.arange(5), 30)
        image = text[labels] + 1.5 * rng.normal(size=(150, 8))
        np.savez(folder / "features" / f"{name}_vitb16.npz", image_features=image, text_features=text, labels=labels)
    main, curves = load_suite("batch-64").choose(["zero_shot", "moon"]), load_suite("sensitivity").choose(["moon"])
    run_suite(main.shorten(2), folder / "features", folder / "results")
    run_suite(curves.shorten(2), folder / "features" / "dtd_vitb16.npz", folder / "results")
    write_report(folder / "results", folder / "report")
    return folder / "report" / "report.html"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_shows(browser, report, width):
    browser.resize(width, 900)
    browser.open(report)
    assert browser.complaints() == []
    assert browser.requests() == [report.as_uri()]
    assert browser.run("[...document.images].every(image => image.complete && image.naturalWidth > 100)")
    assert browser.run("document.images.length") >= 4
    assert browser.run("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")  # wide tables scroll on their own
    headings = browser.run("[...document.querySelectorAll('table')[0].tHead.rows[0].cells].map(c => c.innerText)")
    assert headings[:3] == ["Scenario", "Method", "ImageNet"]
    assert headings[-2:] == ["UCF101", "Avg."]
    assert browser.run("document.querySelectorAll('tr.paper').length") > 0
    if width > 1000:  # eleven datasets and their average fit without scrolling
        assert browser.run("(t => t.scrollWidth <= t.clientWidth)(document.querySelector('.scroll'))")
