"""Outputs that fail: a pipe whose reader goes, a full disk, a closed descriptor, a character set that lacks letters."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from moontide.errors import listed, without_credentials

PROGRAM = [sys.executable, "-c", "import sys; from moontide.cli import main; sys.exit(main())"]


def bash(line, folder, **environment):
    """Run a line of bash with `moontide` in it; returns the status, stdout and stderr of that command."""
    done = subprocess.run(
        ["bash", "-c", f'moontide() {{ "{sys.executable}" -c \'{PROGRAM[2]}\' "$@"; }}; {line}'],
        cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "command", ["methods", "methods --json", "--help", "adapt --help", "doctor", "adapt features.npz"]
)
def test_a_broken_pipe_is_quiet_with_status_141(command, features):
    line = f"moontide {command} | true; exit ${{PIPESTATUS[0]}}"
    assert bash(line, features.parent) == (141, "", "")


def test_a_broken_pipe_of_the_table_of_labels(tmp_path):
    pytest.importorskip("PIL")
    code = "from moontide.cli.classify import _show; import sys; sys.stdout.buffer.write(b'x' * 10**6)"
    script = f"import moontide.cli as c, sys\ndef fake(*a, **o):\n    {code}\nc.app = fake\nsys.exit(c.main([]))"
    (tmp_path / "run.py").write_text(script)
    assert bash(f'"{sys.executable}" run.py | true; exit ${{PIPESTATUS[0]}}', tmp_path) == (141, "", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("command", ["methods", "--help", "methods --json", "adapt features.npz"])
def test_a_full_output_is_one_sentence(command, features):
    status, _, err = bash(f"moontide {command} > /dev/full", features.parent)
    assert (status, err) == (2, "error: Standard output cannot be written: No space left on device.\n")


def test_a_closed_output_is_one_sentence_and_no_file_takes_its_place(features):
    status, out, err = bash("moontide adapt features.npz --out p.csv >&-", features.parent)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1] == "error: Standard output cannot be written: Bad file descriptor."
    assert (features.parent / "p.csv").read_text().startswith("id,label,")  # whole, and without the summary
    assert "changed" not in (features.parent / "p.csv").read_text()


def test_messages_that_nobody_reads_change_nothing(features):
    status, out, err = bash("moontide adapt features.npz --out p.csv 2>&-", features.parent)
    assert (status, err) == (0, "")
    assert "adapted" in out
    assert bash("moontide adapt nowhere.npz 2>&-", features.parent) == (2, "", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_token_that_nobody_has_seen_is_not_kept(tmp_path):
    line = "moontide serve --data d --new-token camera"
    assert bash(f"{line} >/dev/full", tmp_path)[0] == 2
    status, out, _ = bash(line, tmp_path)
    assert status == 0
    assert out.strip()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_messages_that_cannot_be_written_change_nothing(features):
    status, out, _ = bash("moontide adapt features.npz --out p.csv 2>/dev/full", features.parent)
    assert (status, (features.parent / "p.csv").exists()) == (0, True)
    assert "adapted" in out
    assert bash("moontide adapt nowhere.npz 2>/dev/full", features.parent)[:2] == (2, "")


def test_names_that_the_character_set_lacks_are_written_all_the_same(tmp_path, arrays):
    np.savez(tmp_path / "f.npz", **arrays)
    (tmp_path / "names.txt").write_text("Käse\nмолоко\n茶\ncafé\n", encoding="utf-8")
    line = "moontide adapt f.npz --classes names.txt --out p.csv; moontide stream f.npz --classes names.txt"
    status, out, err = bash(line, tmp_path, LC_ALL="POSIX", PYTHONUTF8="0")
    assert (status, "Traceback" in err) == (0, False)
    assert "adapted" in out
    assert {"Käse", "молоко", "茶", "café"} & set(
        (tmp_path / "p.csv").read_text(encoding="utf-8").replace("\n", ",").split(",")
    )
    unlabelled = {name: arrays[name] for name in ("image_features", "text_features")}
    np.savez(tmp_path / "g.npz", **unlabelled)
    status, out, err = bash("moontide adapt g.npz --classes names.txt", tmp_path, LC_ALL="POSIX", PYTHONUTF8="0")
    assert (status, err) == (0, "")
    assert "\\" in out  # the largest classes, as escapes


def test_class_names_on_the_command_line_are_utf_8_in_every_locale(tmp_path, arrays):
    np.savez(tmp_path / "f.npz", **arrays)
    names = [f"猫{k}" for k in range(len(arrays["text_features"]))]
    line = f"moontide adapt f.npz --classes '{','.join(names)}' --out p.csv"
    status, _, err = bash(line, tmp_path, LC_ALL="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (status, "Traceback" in err) == (0, False)
    assert "猫" in (tmp_path / "p.csv").read_text(encoding="utf-8")


def test_a_folder_that_the_locale_cannot_name_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"x")
    code = (
        "from pathlib import Path; from moontide.errors import FileError; from moontide.sorting import apply, plan\n"
        "try:\n    apply(plan([Path('a.jpg')], ['\\u732b'], [0.5], Path('out')), Path('out'))\n"
        "except FileError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )  # fmt: skip
    assert "set PYTHONUTF8=1" in done.stdout, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.jpg"]


@pytest.mark.parametrize("option", ["--sort-into out", "--rename '{label} {number}'"])
def test_classes_that_the_locale_cannot_name_are_refused_before_anything_is_read(tmp_path, option):
    line = f"moontide classify nowhere.jpg --classes 'cat,猫' --encoder tiny --out p.csv {option}"
    status, out, err = bash(line, tmp_path, LC_ALL="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (status, out) == (2, "")
    assert "set PYTHONUTF8=1" in err
    assert not list(tmp_path.iterdir())


def test_credentials_are_never_shown(moontide, features):
    url = "https://user:hunter2@127.0.0.1:9/a.npy?sig=hunter3"
    for options in ((), ("--allow-remote", "https")):
        status, out, err = moontide("adapt", url, "--text", features, "--out", features.parent / "out", *options)
        assert status == 2
        assert "127.0.0.1:9/a.npy" in err
        assert "hunter" not in out + err
    status, out, err = moontide("serve", "--data", "postgresql://me:hunter2@127.0.0.1:9/streams")
    assert status == 2
    assert "hunter" not in out + err
    assert without_credentials("a@b.org and c://x/y?") == "a@b.org and c://x/y?"


@pytest.mark.parametrize(
    "option", ["--text", "--labels", "--known", "--class-prior", "--out", "--method", "--print-config"]
)
def test_credentials_of_an_address_that_is_taken_for_a_path_or_a_name_are_never_shown(moontide, features, option):
    url = "https://user:hunter2@127.0.0.1:9/a.npy?sig=hunter3"
    given = ["--print-config", "--text"] if option == "--print-config" else [option]
    status, out, err = moontide("adapt", features, *given, url)
    assert status == (0 if option == "--print-config" else 2)
    assert "hunter" not in out + err
    assert "***" in out + err


def test_credentials_of_a_skipped_image_are_in_no_output(moontide, tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "a.jpg")
    (tmp_path / "b.txt").write_text("a.jpg\nhttps://user:hunter2@127.0.0.1:9/a.jpg?sig=hunter3\n")
    classify = ["classify", tmp_path / "b.txt", "--allow-urls", "--classes", "cat,dog", "--encoder", "tiny", "--json"]
    status, out, err = moontide(*classify, "--out", tmp_path / "o.csv", "--report", tmp_path / "r.html")
    assert status == 0
    assert "127.0.0.1" in out
    assert "127.0.0.1" in (tmp_path / "r.html").read_text()
    assert "hunter" not in out + err + (tmp_path / "o.csv").read_text() + (tmp_path / "r.html").read_text()


def test_tens_of_thousands_of_names_are_listed_at_once():
    start = time.perf_counter()
    assert listed(map(str, range(200_000)), 9) == "0, 1, 2 and 199997 more"
    assert time.perf_counter() - start < 1


def test_half_a_character_is_not_blamed_on_the_locale(moontide, tmp_path, arrays):
    np.savez(tmp_path / "f.npz", **arrays, classnames=["a\ud800", "b", "c", "d"])
    status, _, err = moontide("adapt", tmp_path / "f.npz", "--out", tmp_path / "p.csv")
    assert status == 2
    assert err.splitlines()[-1] == (
        "error: '\\ud800' is half a character of UTF-16, which no file can hold; correct the name."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["f.npz"]


def test_names_do_nothing_to_a_terminal(moontide, tmp_path, arrays):
    unlabelled = {name: arrays[name] for name in ("image_features", "text_features")}
    np.savez(tmp_path / "f.npz", **unlabelled, classnames=[f"\x1b[31m{k}\x9b2J\x07" for k in range(4)])
    status, out, err = moontide("adapt", tmp_path / "f.npz", "--out", tmp_path / "\x1b[2J.csv")
    assert status == 0
    assert "\\x1b[31m" in out
    assert "wrote " in err
    assert not {"\x1b", "\x9b", "\x07"} & set(out + err)
    status, out, err = moontide("adapt", tmp_path / "\x1b[2J.npz")
    assert (status, out, "\x1b" in err) == (2, "", False)
