"""Bad input, case by case: one sentence on stderr, exit status 2, nothing written, no traceback."""

import os
import signal
import subprocess
import sys
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

CASES = {}


def case(*words, command="adapt"):
    """Register a function (folder, arrays) that makes the files of a case and returns its arguments."""

    def register(make):
        CASES[make.__name__.replace("_", " ")] = (command, make, words)
        return make

    return register


def npz(folder, **arrays):
    np.savez(folder / "f.npz", **{name: value for name, value in arrays.items() if value is not None})
    return folder / "f.npz"


def with_rows(arrays, rows, value):
    image = arrays["image_features"].copy()
    image[rows] = value
    return {**arrays, "image_features": image}


# files


@case("There is no file", "nowhere.npz")
def missing_file(folder, arrays):
    return [folder / "nowhere.npz"]


@case("is a folder")
def folder_instead_of_a_file(folder, arrays):
    return [folder]


@case("f.txt", ".npz, .npy, .safetensors, .parquet", "'.txt'")
def wrong_extension(folder, arrays):
    (folder / "f.txt").write_text("1 2 3")
    return [folder / "f.txt"]


@case("no array 'image_features'", "holds features, text_features")
def missing_image_features(folder, arrays):
    return [npz(folder, features=arrays["image_features"], text_features=arrays["text_features"])]


@case("no array 'text_features'", "holds image_features, labels", "--text")
def missing_text_features(folder, arrays):
    return [npz(folder, **{**arrays, "text_features": None})]


@case("holds nothing")
def npz_without_arrays(folder, arrays):
    return [npz(folder)]


@case("cannot be read", "not a zip file")
def npz_that_is_none(folder, arrays):
    (folder / "f.npz").write_bytes(b"no archive at all")
    return [folder / "f.npz"]


@case("cannot be read")
def empty_npz_file(folder, arrays):
    (folder / "f.npz").touch()
    return [folder / "f.npz"]


@case("cannot be read", "truncated")
def truncated_npz(folder, arrays):
    path = npz(folder, **arrays)
    path.write_bytes(path.read_bytes()[:2000])
    return [path]


@case("cannot be read", "Bad CRC")
def npz_with_a_flipped_byte(folder, arrays):
    path = npz(folder, **arrays)
    data = bytearray(path.read_bytes())
    data[1000] ^= 0xFF
    path.write_bytes(data)
    return [path]


@case("cannot be read")
def npz_whose_entry_is_no_array(folder, arrays):
    with zipfile.ZipFile(folder / "f.npz", "w") as archive:
        archive.writestr("image_features.npy", b"\x93NUMPY\x01\x00rubbish")
    return [folder / "f.npz"]


@case("'classnames'", "Python objects", "dtype=str")
def npz_of_objects(folder, arrays):
    return [npz(folder, **arrays, classnames=np.asarray(["a", "b", "c", "d"], dtype=object))]


@case("Python objects")
def npy_of_objects(folder, arrays):
    np.save(folder / "f.npy", np.asarray([{"a": 1}], dtype=object))
    return [folder / "f.npy"]


@case("is an .npz archive")
def npz_called_npy(folder, arrays):
    npz(folder, **arrays).rename(folder / "f.npy")
    return [folder / "f.npy"]


@case("cannot be read", "truncated")
def truncated_npy(folder, arrays):
    path = folder / "f.npy"
    np.save(path, arrays["image_features"])
    path.write_bytes(path.read_bytes()[:-100])
    return [path, "--text", npz(folder, **arrays)]


@case("no array 'text_features'", "--text")
def npy_without_text(folder, arrays):
    np.save(folder / "f.npy", arrays["image_features"])
    return [folder / "f.npy"]


@case("cannot be read")
def truncated_safetensors(folder, arrays):
    path = folder / "f.safetensors"
    save_file(arrays, path)
    path.write_bytes(path.read_bytes()[:-100])
    return [path]


@case("cannot be read")
def safetensors_that_is_none(folder, arrays):
    (folder / "f.safetensors").write_bytes(b"rubbish " * 20)
    return [folder / "f.safetensors"]


@case("no array 'image_features'", "holds a, b")
def safetensors_with_other_names(folder, arrays):
    save_file({"a": arrays["image_features"], "b": arrays["text_features"]}, folder / "f.safetensors")
    return [folder / "f.safetensors"]


@case("cannot be read")
def truncated_parquet(folder, arrays):
    path = folder / "f.parquet"
    pq.write_table(pa.table({"embedding": arrays["image_features"].tolist()}), path)
    path.write_bytes(path.read_bytes()[:-20])
    return [path, "--text", npz(folder, **arrays)]


@case("column 'embedding'", "It has the columns id, text")
def parquet_without_embeddings(folder, arrays):
    pq.write_table(pa.table({"id": [1], "text": ["a"]}), folder / "f.parquet")
    return [folder / "f.parquet", "--text", npz(folder, **arrays)]


@case("'embedding'", "the same length")
def parquet_with_ragged_lists(folder, arrays):
    pq.write_table(pa.table({"embedding": [[1.0, 2.0], [1.0]]}), folder / "f.parquet")
    return [folder / "f.parquet", "--text", npz(folder, **arrays)]


@case("'embedding'", "missing values", "Got 1")
def parquet_with_missing_rows(folder, arrays):
    pq.write_table(pa.table({"embedding": [[1.0, 2.0], None]}), folder / "f.parquet")
    return [folder / "f.parquet", "--text", npz(folder, **arrays)]


@case("'image_features' must not be empty")
def parquet_without_rows(folder, arrays):
    pq.write_table(pa.table({"embedding": pa.array([], pa.list_(pa.float32(), 16))}), folder / "f.parquet")
    return [folder / "f.parquet", "--text", npz(folder, **arrays)]


# arrays


@case("'image_features' must not be empty", "(0, 16)")
def empty_image_features(folder, arrays):
    return [npz(folder, **{**arrays, "image_features": arrays["image_features"][:0], "labels": None})]


@case("'text_features' must not be empty")
def empty_text_features(folder, arrays):
    return [npz(folder, **{**arrays, "text_features": arrays["text_features"][:0]})]


@case("'image_features' must be finite", "3, 5")
def nan(folder, arrays):
    return [npz(folder, **with_rows(arrays, [3, 5], np.nan))]


@case("'image_features' must be finite", "Row 7")
def infinity(folder, arrays):
    return [npz(folder, **with_rows(arrays, [7], np.inf))]


@case("'text_features' must be finite", "Row 1")
def nan_in_text(folder, arrays):
    text = arrays["text_features"].copy()
    text[1, 2] = np.nan
    return [npz(folder, **{**arrays, "text_features": text})]


@case("'view_features' must be finite", "Row 2")
def nan_in_views(folder, arrays):
    views = np.ones((40, 2, 16), dtype=np.float32)
    views[2] = np.nan
    return [npz(folder, **arrays, view_features=views)]


@case("'views' must have one row per sample (40)")
def too_few_views(folder, arrays):
    return [npz(folder, **arrays, view_features=np.ones((39, 2, 16)))]


@case("all-zero rows", "0, 9")
def zero_rows(folder, arrays):
    return [npz(folder, **with_rows(arrays, [0, 9], 0))]


@case("same dimension", "16 and 15")
def other_dimension(folder, arrays):
    return [npz(folder, **{**arrays, "text_features": arrays["text_features"][:, :15]})]


@case("'image_features' must be a 2-D array", "(40, 16, 1)")
def three_axes(folder, arrays):
    return [npz(folder, **{**arrays, "image_features": arrays["image_features"][:, :, None]})]


@case("'image_features' must hold real numbers")
def text_instead_of_numbers(folder, arrays):
    return [npz(folder, **{**arrays, "image_features": arrays["image_features"].astype(str)})]


@case("'labels' must be class numbers from 0 to 3", "Got 4 in row 2")
def label_out_of_range(folder, arrays):
    arrays["labels"][2] = 4
    return [npz(folder, **arrays)]


@case("'labels' must be class numbers", "Got -1 in row 0")
def negative_label(folder, arrays):
    arrays["labels"][0] = -1
    return [npz(folder, **arrays)]


@case("'labels' must have one entry for each of the 40 samples", "(39,)")
def too_few_labels(folder, arrays):
    return [npz(folder, **{**arrays, "labels": arrays["labels"][1:]})]


@case("'labels' must be integers", "float64")
def fractional_labels(folder, arrays):
    return [npz(folder, **{**arrays, "labels": arrays["labels"] + 0.5})]


@case("no class called 'dog'", "class names")
def labels_file_with_other_names(folder, arrays):
    (folder / "labels.txt").write_text("ant\ndog\n" * (len(arrays["labels"]) // 2))
    return [npz(folder, **arrays), "--labels", folder / "labels.txt", "--classes", "ant,bee,cat,emu"]


@case("There is no file", "labels.npy")
def missing_labels_file(folder, arrays):
    return [npz(folder, **arrays), "--labels", folder / "labels.npy"]


@case("'class_names' must have one name for each of the 4 rows", "Got 2")
def too_few_class_names(folder, arrays):
    return [npz(folder, **arrays, classnames=["a", "b"])]


@case("'class_names'", "Got 3")
def too_few_classes_on_the_command_line(folder, arrays):
    return [npz(folder, **arrays), "--classes", "a,b,c"]


@case("There is no file names.txt")
def missing_classes_file(folder, arrays):
    return [npz(folder, **arrays), "--classes", "names.txt"]


@case("cannot be read", "utf-8")
def classes_file_of_bytes(folder, arrays):
    (folder / "names.txt").write_bytes(b"\xff\xfe\x00\xd8")
    return [npz(folder, **arrays), "--classes", folder / "names.txt"]


@case("'classnames'", "1-D")
def class_names_in_a_table(folder, arrays):
    return [npz(folder, **arrays, classnames=[["a", "b"], ["c", "d"]])]


@case("'temperature'", "one positive number")
def zero_temperature(folder, arrays):
    return [npz(folder, **arrays, temperature=0.0)]


@case("both 'logit_scale' and 'temperature'")
def two_scales(folder, arrays):
    return [npz(folder, **arrays, temperature=0.01, logit_scale=50.0)]


@case("'logit_scale' must be a positive number", "-3")
def negative_logit_scale(folder, arrays):
    return [npz(folder, **arrays), "--logit-scale", "-3"]


# options


@case("no method 'mooon'", "Did you mean 'moon'?")
def unknown_method(folder, arrays):
    return [npz(folder, **arrays), "--method", "mooon"]


@case("option of moon 'betta'", "Did you mean 'beta'?")
def unknown_option(folder, arrays):
    return [npz(folder, **arrays), "--method", "moon", "--set", "betta=soft"]


@case("preset of moon 'papper'", "Did you mean 'paper'?")
def unknown_preset(folder, arrays):
    return [npz(folder, **arrays), "--method", "moon", "--preset", "papper"]


@case("'neighbours' option of moon", "at least 1", "Got 0")
def option_out_of_range(folder, arrays):
    return [npz(folder, **arrays), "--method", "moon", "--set", "neighbours=0"]


@case("'neighbours' option of moon", "'many'")
def option_that_is_no_number(folder, arrays):
    return [npz(folder, **arrays), "--method", "moon", "--set", "neighbours=many"]


@case("no effect", "'gamma_in_counts'")
def option_without_effect(folder, arrays):
    return [npz(folder, **arrays), "--method", "moon", "--set", "beta=soft", "--set", "gamma_in_counts=true"]


@case("form option=value", "'beta'")
def set_without_equals(folder, arrays):
    return [npz(folder, **arrays), "--set", "beta"]


@case("'beta' more than once")
def option_set_twice(folder, arrays):
    return [npz(folder, **arrays), "--set", "beta=soft", "--set", "beta=hard"]


@case("'batch_size' must be at least 1", "Got 0")
def batch_size_zero(folder, arrays):
    return [npz(folder, **arrays), "--batch-size", "0"]


@case("--batch-size", "a whole number", "'many'")
def batch_size_that_is_no_number(folder, arrays):
    return [npz(folder, **arrays), "--batch-size", "many"]


@case("'shuffle' has no effect without 'batch_size'")
def shuffle_without_batches(folder, arrays):
    return [npz(folder, **arrays), "--shuffle"]


@case("--dtype", "float32", "float64")
def unknown_dtype(folder, arrays):
    return [npz(folder, **arrays), "--dtype", "float8"]


@case("--bacth-size", "Did you mean --batch-size?")
def unknown_flag(folder, arrays):
    return [npz(folder, **arrays), "--bacth-size", "8"]


@case("FEATURES")
def no_features_at_all(folder, arrays):
    return []


@case('Unknown command "adpat"', 'Did you mean "adapt"', command="adpat")
def unknown_command(folder, arrays):
    return []


@case("The method mta needs augmented views")
def method_without_what_it_needs(folder, arrays):
    return [npz(folder, **arrays), "--method", "mta"]


# outputs


@case("must end in .npz, .csv, .jsonl, .json, .xlsx, .parquet")
def unknown_output_extension(folder, arrays):
    return [npz(folder, **arrays), "--out", folder / "p.txt"]


@case("does not exist", "create")
def missing_output_folder(folder, arrays):
    return [npz(folder, **arrays), "--out", folder / "missing" / "p.csv"]


@case("cannot be written", "a folder")
def output_that_is_a_folder(folder, arrays):
    (folder / "p.csv").mkdir()
    return [npz(folder, **arrays), "--out", folder / "p.csv"]


@case("cannot be written")
def unwritable_output(folder, arrays):
    return [npz(folder, **arrays), "--out", "/proc/p.csv"]


@case("is also an input of this command")
def output_that_is_the_input(folder, arrays):
    path = npz(folder, **arrays)
    return [path, "--out", path]


@case("must end in .csv, .jsonl", command="compare")
def unknown_extension_of_a_comparison(folder, arrays):
    return [npz(folder, **arrays), "--out", folder / "p.npz"]


@case("no method 'mono'", "Did you mean 'moon'?", command="compare")
def unknown_method_in_a_comparison(folder, arrays):
    return [npz(folder, **arrays), "--methods", "zero_shot,mono"]


@case("There is no file", command="compare")
def comparison_of_a_missing_file(folder, arrays):
    return [folder / "nowhere.npz"]


@case("no method 'moo'", command="methods")
def unknown_method_to_list(folder, arrays):
    return ["moo"]


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_sentence(name, moontide, tmp_path, arrays):
    command, make, words = CASES[name]
    arguments = make(tmp_path, arrays)
    before = sorted(tmp_path.rglob("*"))
    status, out, err = moontide(command, *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word.lower() in err.lower()
    assert sorted(tmp_path.rglob("*")) == before


def test_more_memory_than_there_is(moontide, features, monkeypatch):
    monkeypatch.setattr("moontide.memory.available_bytes", lambda: 1000)
    monkeypatch.setattr("moontide.memory.SMALL", 0)
    status, out, err = moontide("adapt", features)
    assert (status, out) == (2, "")
    assert "needs about" in err
    assert "1000.0 B is available" in err
    assert "--batch-size" in err


def test_a_file_larger_than_memory(moontide, features, monkeypatch):
    monkeypatch.setattr("moontide.store.files.available_bytes", lambda: 1000)
    status, _, err = moontide("adapt", features)
    assert status == 2
    assert "1000.0 B is available; split the file" in err


def test_running_out_of_memory_all_the_same(moontide, features, monkeypatch):
    def fail(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr("moontide.evaluate.run_groups", fail)
    status, _, err = moontide("adapt", features)
    assert status == 2
    assert "not enough memory" in err


def test_torch_or_cuda_that_is_not_there(moontide, features):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    status, _, err = moontide("adapt", features, "--device", "cuda")
    assert status == 2
    assert "no CUDA device" in err


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [("torch", ["--device", "cuda"], "torch"), ("pyarrow", ["--out", "p.parquet"], "parquet")],
)
def test_packages_that_are_not_installed(moontide, features, monkeypatch, package, arguments, extra):
    monkeypatch.setitem(sys.modules, package, None)  # makes `import package` fail
    monkeypatch.delitem(sys.modules, "moontide.store.parquet", raising=False)
    monkeypatch.delattr("moontide.store.parquet", raising=False)
    status, _, err = moontide("adapt", features, *arguments)
    assert status == 2
    assert f"pip install '.[{extra}]'" in err


def test_double_class_names_are_a_warning(moontide, tmp_path, arrays):
    path = npz(tmp_path, **arrays, classnames=["ant", "bee", "ant", "dog"])
    status, out, err = moontide("adapt", path, "--batch-size", "8")
    assert status == 0
    assert err.count("warning: class names appear more than once: ant; name each once\n") == 1
    assert "adapted" in out


def test_interrupt_stops_with_one_line(moontide, features, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("moontide.evaluate.run_groups", interrupt)
    assert moontide("adapt", features, "--out", features.with_name("p.csv")) == (130, "", "error: interrupted\n")
    assert not features.with_name("p.csv").exists()


def program(folder, *arguments):
    # a job in the background is started with SIGINT ignored
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{start}; from moontide.cli import main; sys.exit(main())"]
    return subprocess.Popen(
        [*command, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_interrupt_of_the_real_program(tmp_path, arrays):
    npz(tmp_path, **arrays)
    os.mkfifo(tmp_path / "names")  # the program waits for names that never come
    running = program(tmp_path, "adapt", "f.npz", "--classes", "names", "--out", "p.csv")
    with open(tmp_path / "names", "w"):
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (130, "", "error: interrupted\n")
    assert not (tmp_path / "p.csv").exists()


def test_bad_input_to_the_real_program(tmp_path):
    running = program(tmp_path, "adapt", "missing.npz")
    assert running.communicate() == ("", "error: There is no file missing.npz.\n")
    assert running.returncode == 2
