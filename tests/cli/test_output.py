"""What every command takes: --json, --quiet, --seed, moontide.toml with --print-config, and completion of a shell."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moontide
from moontide.cli import app, main
from moontide.simulate import simulate

COMMANDS = ["classify", "encode", "adapt", "stream", "compare", "serve", "export", "methods", "doctor", "demo", "undo"]


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    data = simulate(40, 5, seed=0)
    np.savez(tmp_path / "a.npz", image_features=data.features, text_features=data.text, labels=data.labels)
    monkeypatch.chdir(tmp_path)
    return "a.npz"


@pytest.mark.parametrize("command", [*COMMANDS, "completion", "bench run", "bench report", "bench list"])
def test_every_command_has_the_options_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    printed = capsys.readouterr().out
    for option in ("--json", "--quiet", "--seed", "--print-config"):
        assert option in printed


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["adapt", "a.npz"], {"samples", "changed", "accuracy", "zero_shot_accuracy"}),
        (["adapt", "a.npz", "--unknown", "0.1", "--out", "o.csv"], {"none", "out"}),
        (["stream", "a.npz", "--save-state", "s.safetensors"], {"samples", "seen", "state"}),
        (["doctor"], {"python", "devices"}),
        (["bench", "list"], {"suites"}),
        (["methods", "tide"], {"name", "options"}),
    ],
)
def test_json_is_one_object_and_nothing_else(
    pack: str, capsys: pytest.CaptureFixture[str], arguments: list[str], keys: set[str]
) -> None:
    assert main([*arguments, "--json"]) == 0
    assert keys <= json.loads(capsys.readouterr().out).keys()


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (["doctor"], {"python", "platform", "cpu_cores", "memory_bytes", "devices", "packages", "missing"}),
        (["completion", "bash"], {"shell", "script"}),
        (["demo", "--images", "nowhere", "--batches", "1"], {"tasks", "written"}),
        (["serve", "--data", "data", "--new-token", "camera"], {"name", "token"}),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_json_has_values_and_not_lines(
    pack: str, command: list[str], keys: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if command[0] == "serve":
        pytest.importorskip("fastapi")
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == keys


def test_rows_of_very_different_lengths_are_questioned_in_files_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = simulate(100, 20, seed=0)
    rows = data.features * np.geomspace(1, 1000, 100)[:, None]
    np.savez(tmp_path / "a.npz", image_features=rows, text_features=data.text)
    assert main(["adapt", str(tmp_path / "a.npz")]) == 0
    assert capsys.readouterr().err.count("warning: The image features have lengths from") == 1


def test_methods_and_compare_are_lists_in_json(pack: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--json"]) == 0
    assert "tide" in [one["name"] for one in json.loads(capsys.readouterr().out)]
    assert main(["compare", pack, "--methods", "zero_shot", "--json"]) == 0
    assert [one["method"] for one in json.loads(capsys.readouterr().out)] == ["zero_shot"]


def test_quiet_prints_nothing_but_errors(pack: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapt", pack, "--batch-size", "9", "--logit-scale", "1", "--out", "o.csv", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["adapt", "none.npz", "--quiet"]) == 2
    assert capsys.readouterr().err == "error: There is no file none.npz.\n"


def test_the_seed_decides_what_is_drawn(pack: str) -> None:
    def labels(number: int) -> list[float]:
        flags = ["--batch-size", "4", "--shuffle", "--seed", str(number)]
        assert main(["adapt", pack, *flags, "--out", "o.npz", "--quiet"]) == 0
        with np.load("o.npz") as held:
            return held["probs"].tolist()  # type: ignore[no-any-return]

    assert labels(1) == labels(1) != labels(2)


def test_a_config_file_has_the_defaults_and_is_shown(pack: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("moontide.toml").write_text('[adapt]\nmethod = "moon"\nset = ["neighbours=4"]\nbatch-size = 8\n')
    assert main(["adapt", pack, "--print-config"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert {'method = "moon"', 'set = ["neighbours=4"]', "batch-size = 8", "# out is not set"} <= set(printed)
    assert main(["adapt", pack]) == 0
    assert "moon: 40 samples in 5 batches" in capsys.readouterr().err
    assert main(["adapt", pack, "--batch-size", "20"]) == 0  # the command line goes before the file
    assert "moon: 40 samples in 2 batches" in capsys.readouterr().err


def test_a_config_file_with_an_unknown_option_is_refused(pack: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("moontide.toml").write_text('[adapt]\nmethd = "moon"\n')
    assert main(["adapt", pack]) == 2
    assert "Did you mean --method?" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "moontide.bash").write_text(capsys.readouterr().out)
    script = """
        source moontide.bash
        COMP_WORDS=(moontide ad); COMP_CWORD=1; _moontide; echo "${COMPREPLY[@]}"
        COMP_WORDS=(moontide adapt --batch); COMP_CWORD=2; _moontide; echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["adapt", "--batch-size"], done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_too(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "moontide" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "words"),
    [("cuda:1", "no CUDA device"), ("mps", "no MPS device"), ("gpu", "must be cpu, cuda"), ("cuda:x", "must be cpu")],
)
def test_devices_that_are_not_there_are_one_sentence(
    pack: str, capsys: pytest.CaptureFixture[str], device: str, words: str
) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has such a device")
    assert main(["adapt", pack, "--device", device]) == 2
    assert words in capsys.readouterr().err


def test_the_package_logs_under_its_name_and_is_silent_by_default(caplog: pytest.LogCaptureFixture) -> None:
    data = simulate(20, 3, seed=0)
    with caplog.at_level(logging.DEBUG, logger="moontide"):
        moontide.TIDE().fit_predict(data.features, data.text)
    assert "tide on 20 samples and 3 classes" in caplog.text
    assert all(record.name.startswith("moontide") for record in caplog.records)


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "moontide", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, moontide.__version__)


def test_the_app_names_every_command() -> None:
    assert {*COMMANDS, "bench", "completion"} <= set(app)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[[[[", "moontide.toml cannot be read"),
        (b"\xff\xfe", "moontide.toml cannot be read"),
        (b'[adapt]\nout = "a\\u0000b.csv"\n', "NUL"),
        (b'[classify]\nsort-into = "a\\u0000b"\n', "NUL"),
        (b'[adapt]\nset = ["neighbours=4", "\\u0000=1"]\n', "NUL"),
        (b"[adapt]\nbatch-size = inf\n", "must be a whole number"),
        (b"adapt = 3\n", "must be a mapping"),
        (None, "moontide.toml is a folder"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_one_sentence(
    pack: str, capsys: pytest.CaptureFixture[str], text: bytes | None, words: str
) -> None:
    Path("moontide.toml").mkdir() if text is None else Path("moontide.toml").write_bytes(text)
    command = ["classify", ".", "--classes", "a,b"] if text and b"[classify]" in text else ["adapt", pack]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("name", "status", "words"), [("nowhere.toml", 2, "nowhere.toml"), ("", 0, "")])
def test_a_configuration_that_the_environment_names_must_exist(pack: str, name: str, status: int, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moontide", "adapt", pack], capture_output=True, text=True,
        env={**os.environ, "MOONTIDE_CONFIG": name}, timeout=50,
    )  # fmt: skip
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_was_removed_under_the_command_is_one_sentence(pack: str, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        ["bash", "-c", f'rmdir ../gone; "{sys.executable}" -m moontide adapt {pack}'],
        cwd=tmp_path / "gone", capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: The current folder does not exist any more; change to another one.\n"
