"""Images that are sorted or renamed: cut off anywhere, each is there once, and undo restores what was there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moontide import sorting
from moontide.cli import main
from moontide.errors import FileError, MoontideError, OptionError
from moontide.sorting import UNDO, Move, apply, plan, safe, undo

# kills the process at every file operation of a command in turn, or lets the operation fail, in a forked process
CUT = """
import os, shutil, sys
from pathlib import Path
from moontide.errors import MoontideError
from moontide.sorting import UNDO, Move, apply, plan, undo

way, what, how, here = *sys.argv[1:4], Path(sys.argv[4])
EVENTS = ("open", "os.rename", "os.mkdir", "os.symlink", "os.remove", "os.rmdir", "os.utime", "os.chmod")
count, number = 0, 0

def watch(event, arguments):
    global count
    if number and event in EVENTS and not isinstance(arguments[0], int) and str(here) in os.fsdecode(arguments[0]):
        count += 1
        if count == number and how == "kill":
            os._exit(9)
        if count == number and how == "interrupt":
            raise KeyboardInterrupt
        if count == number or (count > number and how == "broken"):
            raise OSError(28, "No space left on device")

def sort():
    old = [here / "in" / name for name in ("a.jpg", "b.jpg", "c.jpg")]
    if way == "rename":
        new = [here / "in" / name for name in ("b.jpg", "a.jpg", "d.jpg")]
        apply([Move(source, target, way) for source, target in zip(old, new)], here / "in")
    else:
        apply(plan(old, ["x", "y", "x"], [1.0] * 3, here / "out", copy=way == "copy"), here / "out")

sorted_folder = here / ("in" if way == "rename" else "out")

def take_back():
    try:
        undo(sorted_folder)
    except MoontideError as error:
        assert "nothing to undo" in str(error), error

def child():
    global number
    sys.addaudithook(watch)
    if what == "undo":
        sort()
    number = step
    try:
        sort() if what == "sort" else undo(sorted_folder)
    except (MoontideError, KeyboardInterrupt) as error:
        assert isinstance(error, KeyboardInterrupt) == (how == "interrupt"), error
        assert chr(10) not in str(error)
        number = 0
        os._exit(8)
    os._exit(9 if count >= number else 0)  # of a failure that was of no consequence

def held():
    found = [path for path in here.rglob("*") if path.is_file() and not path.is_symlink() and UNDO not in path.name]
    return {path.relative_to(here).as_posix(): path.read_text() for path in found}

whole = {"in/" + name: name for name in ("a.jpg", "b.jpg", "c.jpg")}
for step in range(1, 500):
    shutil.rmtree(here, ignore_errors=True)
    (here / "in").mkdir(parents=True)
    for name, text in whole.items():
        (here / name).write_text(text)
    process = os.fork()
    if not process:
        try:
            child()
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status == 0:
        break
    assert status in (8, 9), (step, status)
    if way == "rename":
        assert sorted(held().values()) == sorted(whole.values()), (step, held())
    assert way == "rename" or whole.items() <= held().items(), (step, held())
    if what == "sort" and how in ("fail", "interrupt") and status == 8:
        assert held() == whole, (step, held())
        assert not (here / "out" / UNDO).exists() and not (here / "in" / UNDO).exists()
    take_back()
    assert held() == whole, (step, held())
    assert not list(here.rglob("*" + UNDO + "*")), step
    assert all(path.is_dir() and not path.is_symlink() for path in (here / "out").rglob("*")), step
print(step)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the process that is killed is a forked one")
@pytest.mark.parametrize("how", ["kill", "fail", "interrupt", "broken"])
@pytest.mark.parametrize("what", ["sort", "undo"])
@pytest.mark.parametrize("way", ["link", "copy", "rename"])
def test_an_end_at_any_file_operation_loses_nothing_and_can_be_undone(
    way: str, what: str, how: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", CUT, way, what, how, str(tmp_path / "here")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert 5 < int(done.stdout) < 100


def images(folder: Path) -> list[Path]:
    folder.mkdir()
    found = [folder / f"{name}.jpg" for name in "abc"]
    for path in found:
        path.write_text(path.name)
    return found


def texts(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("place", ["file/out", "a.jpg", "x" * 300, "loop/out"])
def test_a_folder_that_cannot_be_made_is_one_sentence_and_nothing_is_moved(place: str, tmp_path: Path) -> None:
    files = images(tmp_path / "in")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    before = texts(tmp_path)
    out = tmp_path / "in" / "a.jpg" if place == "a.jpg" else tmp_path / place
    with pytest.raises(FileError, match=r"cannot be sorted into: .*Nothing was moved") as caught:
        apply(plan(files, ["x"] * 3, [1.0] * 3, out), out)
    assert "nothing to undo" not in str(caught.value)
    with pytest.raises((MoontideError, OSError)):
        sorting.check_folder(out)
    assert texts(tmp_path) == before


def test_a_folder_that_cannot_be_made_is_refused_before_images_are_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    line = ["classify", str(tmp_path / "nowhere"), "--classes", "a,b", "--sort-into", str(tmp_path / "file" / "out")]
    assert main(line) == 2
    assert "file/out cannot be made: Not a directory." in capfd.readouterr().err


def test_a_name_that_is_taken_on_the_way_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = images(tmp_path / "in")
    monkeypatch.setattr(sorting, "_check_targets", lambda moves: None)  # as if it came later
    (tmp_path / "in" / "xb.jpg").write_text("mine")
    before = texts(tmp_path)
    with pytest.raises(FileError, match=r"File exists\. Everything was reversed\.$"):
        apply(plan(files, ["x"] * 3, [1.0] * 3, pattern="{label}{name}"), tmp_path / "in")
    assert texts(tmp_path) == before


def test_an_image_whose_old_name_is_taken_stays_where_it_is_and_is_not_lost(tmp_path: Path) -> None:
    files = images(tmp_path / "in")
    apply(plan(files, ["x"] * 3, [1.0] * 3, pattern="{label}{name}"), tmp_path / "in")
    files[1].write_text("mine")
    before = texts(tmp_path)
    with pytest.raises(FileError, match=r"b.jpg exists already and is not overwritten; move it away, and undo again"):
        undo(tmp_path / "in")
    assert texts(tmp_path) == before
    files[1].unlink()
    assert undo(tmp_path / "in") == 3
    assert texts(tmp_path / "in") == {path.name: path.name for path in files}


def test_two_processes_cannot_have_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, out = images(tmp_path / "in"), tmp_path / "out"
    apply(plan(files, ["x"] * 3, [1.0] * 3, out), out)
    before = texts(tmp_path)
    monkeypatch.setattr(os.path, "lexists", lambda path: False)  # as if the other was faster from here on
    with pytest.raises(FileError, match=r"cannot be sorted into: File exists. Nothing was moved"):
        apply(plan(files, ["y"] * 3, [1.0] * 3, out), out)
    monkeypatch.undo()
    assert texts(tmp_path) == before


@pytest.mark.parametrize("source", ["/etc/a.jpg", "../other/a.jpg", "link/a.jpg", "..", "sub/../../other/a.jpg"])
@pytest.mark.parametrize("way", ["rename", "copy", "link"])
@pytest.mark.parametrize("end", ["source", "target"])
def test_a_record_that_leads_outside_the_folder_is_refused(source: str, way: str, end: str, tmp_path: Path) -> None:
    files = images(tmp_path / "in")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.jpg").write_text("a.jpg")
    (tmp_path / "in" / "link").symlink_to("../other")
    move = [source, "a.jpg", way] if end == "source" else [str(files[0]) if way != "rename" else "a.jpg", source, way]
    record = {"moontide": "undo", "prefix": ".moontide-0-", "placed": True, "moves": [move]}
    (tmp_path / "in" / UNDO).write_text(json.dumps(record))
    before = texts(tmp_path)
    if way == "rename" or end == "target":
        with pytest.raises(FileError, match=r"is outside the folder .*, so nothing was moved"):
            undo(tmp_path / "in")
        assert texts(tmp_path) == before
    else:  # links and copies may come from anywhere, and what is neither stays
        undo(tmp_path / "in")
        assert "other/a.jpg" in texts(tmp_path)
        assert "in/b.jpg" in texts(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,
        "{}",
        '{"moontide": "undo", "prefix": "../../x", "placed": true, "moves": []}',
        '{"moontide": "undo", "prefix": ".moontide-0-", "placed": true, "moves": [["a.jpg"]]}',
        '{"moontide": "undo", "prefix": ".moontide-0-", "placed": true, "moves": [["a.jpg", "b.jpg", "burn"]]}',
        '{"moontide": "undo", "prefix": ".moontide-0-", "placed": true, "moves": [["a\\u0000", "b.jpg", "rename"]]}',
        '{"moontide": "undo", "prefix": ".moontide-0-", "placed": true, "moves": [[1, 2, "rename"]]}',
    ],
)
def test_a_record_that_is_damaged_is_refused(text: str, tmp_path: Path) -> None:
    images(tmp_path / "in")
    (tmp_path / "in" / UNDO).write_text(text)
    before = texts(tmp_path)
    with pytest.raises(FileError, match="cannot be read"):
        undo(tmp_path / "in")
    assert texts(tmp_path) == before


def test_an_image_that_a_record_calls_its_own_copy_is_kept(tmp_path: Path) -> None:
    files = images(tmp_path / "in")
    os.link(files[0], tmp_path / "in" / "hard.jpg")
    (tmp_path / "in" / "soft.jpg").symlink_to(files[1])
    rows = [[str(files[0]), "a.jpg", "copy"], [str(files[0]), "hard.jpg", "copy"], [str(files[1]), "soft.jpg", "copy"]]
    record = {"moontide": "undo", "prefix": ".moontide-0-", "placed": False, "moves": rows}
    (tmp_path / "in" / UNDO).write_text(json.dumps(record))
    assert undo(tmp_path / "in") == 0
    assert sorted(texts(tmp_path / "in")) == ["a.jpg", "b.jpg", "c.jpg", "hard.jpg", "soft.jpg"]


def test_a_copy_with_other_contents_of_the_same_size_and_time_is_kept(tmp_path: Path) -> None:
    files, out = images(tmp_path / "in"), tmp_path / "out"
    apply(plan(files, ["x"] * 3, [1.0] * 3, out, copy=True), out)
    times = os.stat(out / "x" / "b.jpg")
    (out / "x" / "b.jpg").write_text("B.jpg")
    os.utime(out / "x" / "b.jpg", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert undo(out) == 2
    assert texts(out) == {"x/b.jpg": "B.jpg"}


def test_a_sorted_folder_can_be_moved_before_it_is_undone(tmp_path: Path) -> None:
    files = images(tmp_path / "in")
    apply(plan(files, ["x"] * 3, [1.0] * 3, tmp_path / "out"), tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    assert undo(tmp_path / "elsewhere") == 3
    assert not (tmp_path / "elsewhere").exists()
    apply(plan(files, ["x"] * 3, [1.0] * 3, pattern="{label}{name}"), tmp_path / "in")
    (tmp_path / "in").rename(tmp_path / "moved")
    assert undo(tmp_path / "moved") == 3
    assert sorted(texts(tmp_path / "moved")) == ["a.jpg", "b.jpg", "c.jpg"]


def test_a_link_in_the_folder_does_not_lead_renaming_outside(tmp_path: Path) -> None:
    images(tmp_path / "in")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "d.jpg").write_text("d.jpg")
    (tmp_path / "in" / "link").symlink_to("../other")
    before = texts(tmp_path)
    with pytest.raises(FileError, match="is outside the folder"):
        apply([Move(tmp_path / "in/link/d.jpg", tmp_path / "in/link/e.jpg", "rename")], tmp_path / "in")
    assert texts(tmp_path) == before


def test_an_image_that_is_listed_twice_is_not_renamed_twice(tmp_path: Path) -> None:
    files = images(tmp_path / "in")
    with pytest.raises(FileError, match="list each image once"):
        apply(plan([files[0], files[0]], ["x"] * 2, [1.0] * 2, pattern="{label}{number}"), tmp_path / "in")
    assert sorted(texts(tmp_path / "in")) == ["a.jpg", "b.jpg", "c.jpg"]


@pytest.mark.parametrize(
    "label",
    [
        *("a/b", "..", ".", "", " ", "/", "/etc/passwd", "a\0b", "a\nb", "\x7f\x9b", "CON", "lpt1.txt", "nul", UNDO),
        *(UNDO.upper(), "x" * 5000, "\N{CAT}" * 300, "C:\\x", "~", "-rf", "\u202egpj.exe", ".ssh", "a" * 99 + "."),
    ],
)
def test_every_class_name_makes_one_folder_inside(label: str, tmp_path: Path) -> None:
    files, out = images(tmp_path / "in"), tmp_path / "out"
    apply(plan(files, [label] * 3, [1.0] * 3, out, pattern="{label} {number} {name}"), out)
    (made,) = [path for path in out.iterdir() if path.name != UNDO]
    assert len(list(made.iterdir())) == 3
    assert len(os.fsencode(made.name)) <= 200
    assert made.name == safe(label) != UNDO
    assert undo(out) == 3
    assert sorted(texts(tmp_path)) == ["in/a.jpg", "in/b.jpg", "in/c.jpg"]


def test_a_pattern_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="must contain"):
        plan([tmp_path / "a.jpg"], ["x"], [1.0], pattern="{label}")


def test_thousands_of_images_of_one_name_are_numbered() -> None:
    images = [Path(f"camera{i}/a.jpg") for i in range(20_000)]
    moves = plan(images, ["cat"] * len(images), [0.5] * len(images), Path("out"))
    assert [str(move.target) for move in (moves[0], moves[1], moves[-1])] == [
        "out/cat/a.jpg", "out/cat/a (2).jpg", "out/cat/a (20000).jpg",
    ]  # fmt: skip
