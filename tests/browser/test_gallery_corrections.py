"""Labels that a person corrects in the page, in a real browser: by keys, by hand, kept, written, and read again."""

import time

import numpy as np
import pytest

import moontide
from moontide.answers import NONE_OF_THESE, answer
from moontide.metrics import expected_calibration_error
from moontide.report.gallery import write_gallery
from moontide.simulate import simulate
from moontide.store.inputs import read_known, read_none
from moontide.types import Task

N, K = 80, 12
NAMES = ["ant", "bee", "cat", "caterpillar", 'dog, "big"', "<b>eel</b>", "fox", "gnu", "hen", "ibis", "jay", "koi"]


def paths(folder):
    """Name the images so that the page is one of its own to the browser, and no test sees what another one kept."""
    return [f'{folder.name}/shop {i % 3}/a,"{i:02d}".jpg' for i in range(N)]


def write(path, known=None, seed=0):
    data = simulate(N, K, dim=32, effective_classes=4, seed=seed)
    task = Task(data.features, data.text, data.logit_scale, NAMES, known=known)
    result = moontide.TIDE().fit_predict(task)
    write_gallery(path, task, result, paths(path.parent), lambda i, side: None, truth=data.labels)
    return task, result, data.labels


@pytest.fixture
def page(browser, tmp_path):
    made = write(tmp_path / "a.html")
    browser.resize(1280, 900)
    browser.open(tmp_path / "a.html")
    browser.made = made
    yield browser
    assert browser.complaints() == []
    assert browser.requests() == [(tmp_path / "a.html").as_uri()]


def fixes(tab):
    return dict(tab.run("[...fixes]"))


def focused(tab):
    return tab.run("Number(document.activeElement.dataset.image)")


def spell(tab, word):
    for letter in word:
        tab.press(letter)


def focus_first(tab):
    tab.run("document.querySelector('#grid .tile').focus()")
    return focused(tab)


def csv_of(tab, folder):
    """Press the button and return the file that the browser saves."""
    tab("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    tab.run("$('export').click()")
    for _ in range(2400):  # two minutes, on a machine that does much else
        if (folder / "labels.csv").exists():
            return folder / "labels.csv"
        time.sleep(0.05)
    raise AssertionError("nothing was saved")


def test_a_label_is_corrected_by_keys_alone(page):
    first = focus_first(page)
    page.press("ArrowRight", 39)
    i = focused(page)
    assert i == page.run("state.found[1]") != first
    spell(page, "cat")
    assert page.run("[...document.querySelectorAll('#matches li')].map((m) => m.textContent)") == ["cat", "caterpillar"]
    page.press("ArrowDown", 40)
    page.press("Enter", 13)
    assert fixes(page) == {i: 3}
    assert page.run("$('chooser').hidden")
    assert focused(page) == i
    how = "confirmed" if page.made[1].labels[i] == 3 else "corrected"
    assert f"{how}: caterpillar" in page.run("document.activeElement.textContent")
    assert page.run("document.activeElement.classList.contains('fixed')")
    assert page.run("$('fixed').textContent") == "1 label known, 1 of them set here."
    page.press("Backspace", 8)
    assert fixes(page) == {}
    assert focused(page) == i
    assert not page.run("document.querySelector('.tile.fixed')")


def test_escape_and_words_without_a_class_change_nothing(page):
    i = focus_first(page)
    spell(page, "zzz")
    assert "No class has that name." in page.run("$('matches').textContent")
    page.press("Enter", 13)
    assert not page.run("$('chooser').hidden")
    page.press("Escape", 27)
    assert (page.run("$('chooser').hidden"), fixes(page), focused(page)) == (True, {}, i)


def test_backspace_in_the_empty_field_takes_a_label_back(page):
    i = focus_first(page)
    spell(page, "fox")
    page.press("Enter", 13)
    assert fixes(page) == {i: 6}
    spell(page, "g")
    page.press("Backspace", 8)  # the letter
    assert fixes(page) == {i: 6}
    page.press("Backspace", 8)
    assert (fixes(page), page.run("$('chooser').hidden")) == ({}, True)


def test_arrows_go_across_rows_and_pages(page):
    focus_first(page)
    across = page.run(
        "(() => { const t = [...document.querySelectorAll('#grid .tile')].map((x) => x.getBoundingClientRect().top);"
        " return t.filter((y) => y === t[0]).length })()"
    )
    assert across > 1
    page.press("ArrowDown", 40)
    assert focused(page) == page.run(f"state.found[{across}]")
    page.press("ArrowUp", 38)
    page.press("ArrowUp", 38)  # nothing is above
    assert focused(page) == page.run("state.found[0]")
    page.run("[...document.querySelectorAll('#grid .tile')].at(-1).focus()")
    page.press("ArrowRight", 39)
    assert (page.run("state.page"), focused(page)) == (1, page.run("state.found[60]"))
    page.press("ArrowLeft", 37)
    assert (page.run("state.page"), focused(page)) == (0, page.run("state.found[59]"))


def test_a_label_is_corrected_in_the_open_picture_by_letters_or_by_the_list(page):
    page.run("open(5)")
    spell(page, "hen")
    page.press("Escape", 27)
    assert page.run("$('one').open")
    assert fixes(page) == {}
    spell(page, "hen")
    page.press("Enter", 13)
    assert fixes(page) == {5: 8}
    assert "corrected: hen" in page.run("$('one-fix').textContent")
    page.press("ArrowRight", 39)
    assert page.run("current") != 5
    assert page.run("$('fix').value") == ""
    page.run("open(7); $('fix').value = '4'; $('fix').dispatchEvent(new Event('change'))")
    assert fixes(page) == {5: 8, 7: 4}
    assert 'dog, "big"' in page.run("$('one-fix').textContent")
    page.run("$('fix').value = ''; $('fix').dispatchEvent(new Event('change'))")
    assert fixes(page) == {5: 8}


def test_a_class_is_chosen_by_a_press(page):
    i = focus_first(page)
    spell(page, "e")
    x, y = page.run(
        "(() => { const b = [...document.querySelectorAll('#matches li')].find((m) => m.textContent.includes('eel'))"
        ".getBoundingClientRect(); return [b.left + 5, b.top + 5] })()"
    )
    page.click(x, y)
    assert fixes(page) == {i: 5}
    assert page.run("document.querySelectorAll('#grid b, #matches b').length") == 0  # names stay text


def test_corrections_survive_a_reload_and_stay_with_their_report(page, tmp_path):
    assert page.run("localStorage.getItem(KEPT)") is None  # of a page that was only looked at
    page.run("fix(3, 1); fix(9, 2)")
    page.run("new Promise((done) => setTimeout(done, 300))")  # the browser writes it down in its own time
    page.open(tmp_path / "a.html")
    assert fixes(page) == {3: 1, 9: 2}
    assert page.run("$('fixed').textContent") == "2 labels known, 2 of them set here."
    write(tmp_path / "b.html", seed=1)
    page.open(tmp_path / "b.html")
    assert fixes(page) == {}
    page.open(tmp_path / "a.html")
    assert fixes(page) == {3: 1, 9: 2}
    page.run("$('forget').click()")
    assert fixes(page) == {}
    page.run("$('forget').click()")  # on second thoughts
    assert fixes(page) == {3: 1, 9: 2}
    page.run("$('kind').value = 'known'; find()")
    assert sorted(page.run("[...state.found]")) == [3, 9]


def test_what_is_exported_is_read_as_known_labels(page, tmp_path):
    page.run("for (let k = 0; k < K; k++) fix(2 * k, k)")
    known = read_known(csv_of(page, tmp_path), paths(tmp_path), NAMES, K)
    expected = np.full(N, -1)
    expected[np.arange(0, 2 * K, 2)] = np.arange(K)
    np.testing.assert_array_equal(known, expected)


def test_known_labels_are_marked_exported_again_and_not_scored(page, tmp_path):
    _, _, labels = page.made
    known = np.full(N, -1)
    known[:10] = labels[:10]
    _, result, _ = write(tmp_path / "a.html", known)
    page.open(tmp_path / "a.html")
    assert fixes(page) == dict(enumerate(labels[:10].tolist()))
    right = float((result.labels == labels)[10:].mean())
    assert f"{100 * right:.1f}" in page.run("$('facts').textContent")
    page.run("open(0)")
    assert "known: " in page.run("$('one-fix').textContent")
    page.run("fix(0, null); fix(20, 11)")
    known[0], known[20] = -1, 11
    np.testing.assert_array_equal(read_known(csv_of(page, tmp_path), paths(tmp_path), NAMES, K), known)
    total = "[...document.querySelectorAll('#matrix button')].reduce((sum, b) => sum + Number(b.textContent), 0)"
    assert page.run(total) == N - 10


def test_a_browser_that_keeps_nothing_says_so(page, tmp_path):
    page.run("Storage.prototype.setItem = () => { throw new Error('full') }; fix(1, 1)")
    assert not page.run("$('unsaved').hidden")
    assert fixes(page) == {1: 1}


def test_reliability_is_drawn_with_the_pooled_error(page):
    _, result, labels = page.made
    before = expected_calibration_error(labels, result.zero_shot_labels, result.zero_shot.max(axis=1))
    now = expected_calibration_error(labels, result.labels, result.confidence)
    assert f"zero-shot {100 * before:.1f}\u00a0%, after {100 * now:.1f}\u00a0%" in page.run("$('ece').textContent")
    drawn = page.run("['early', 'now'].map((c) => document.querySelectorAll(`#reliability .mark.${c}`).length)")
    assert drawn == page.run("[D.calibration.before.length, D.calibration.now.length]")
    assert all(drawn)
    counts = page.run("[...document.querySelectorAll('#bins tbody td:last-child')].map((c) => Number(c.textContent))")
    assert sum(counts) == 2 * N


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_the_list_and_no_sideways_scrolling(page, scheme):
    page.resize(390, 844, scheme)
    page.run("open(5); $('fix').value = '1'; $('fix').dispatchEvent(new Event('change'))")
    assert fixes(page) == {5: 1}
    box = page.run("(() => { const b = $('fix').getBoundingClientRect(); return [b.left, b.right, b.height] })()")
    assert box[0] >= 0
    assert box[1] <= 390
    assert box[2] >= 36
    page.run("$('one').close()")
    assert page.run("document.documentElement.scrollWidth") == 390


def test_none_of_these_is_a_class_of_its_own_on_the_page_and_can_be_chosen(browser, tmp_path):
    data = simulate(N, K, dim=32, effective_classes=4, seed=0)
    task = Task(data.features, data.text, data.logit_scale, NAMES)
    result = moontide.TIDE().fit_predict(task)
    answers = answer(result, NAMES, unknown=0.25)
    names = paths(tmp_path)
    write_gallery(tmp_path / "a.html", task, result, names, lambda i, side: None, answers=answers)
    browser.resize(1280, 900)
    browser.open(tmp_path / "a.html")
    assert browser.run("document.getElementById('title').textContent") == f"{N} images, {K} classes"
    assert f"{NONE_OF_THESE} (20)" in browser.run("document.getElementById('label').textContent")
    chosen = focus_first(browser)
    spell(browser, "none")
    browser.press("Enter")
    assert fixes(browser) == {chosen: K}
    (tmp_path / "known.csv").write_text(browser.run("toCsv()"))
    assert read_none(tmp_path / "known.csv", names).index(True) == chosen
    assert (read_known(tmp_path / "known.csv", names, NAMES, K) == -1).all()
    assert browser.complaints() == []
