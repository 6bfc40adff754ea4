import json

import pytest

from moontide.bench.records import Log, environment, key, read_records
from moontide.errors import FileError


def test_every_log_is_a_file_of_its_own_made_with_the_first_line(tmp_path):
    logs = [Log(tmp_path, "s") for _ in range(3)]
    assert list(tmp_path.iterdir()) == []
    for number, log in enumerate(logs):
        log.write({"run": number})
        log.write({"run": 10 + number})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.000.jsonl", "s.001.jsonl", "s.002.jsonl"]
    assert sorted(record["run"] for record in read_records(tmp_path)) == [0, 1, 2, 10, 11, 12]


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_torn_last_line_is_left_out(tmp_path, cut):
    line = json.dumps({"run": 7}) + "\n"
    (tmp_path / "s.000.jsonl").write_text(line + line[:-cut])
    assert list(read_records(tmp_path)) == [{"run": 7}]


def test_damage_before_the_last_line_is_reported(tmp_path):
    (tmp_path / "s.000.jsonl").write_text('{"run": 1}\n{"ru\n{"run": 2}\n')
    with pytest.raises(FileError, match=r"Line 2 of .*s\.000\.jsonl is damaged"):
        list(read_records(tmp_path))


def test_the_key_depends_on_what_makes_a_run_and_on_nothing_else():
    run = {
        "suite": "s", "version": 1, "dataset": "d", "features": "f", "scenario": {"id": "x"}, "run": 0,
        "method": "moon", "options": {"a": 1, "b": 2},
    }  # fmt: skip
    assert key({**run, "options": {"b": 2, "a": 1}, "seconds": 3, "label": "l"}) == key(run)
    for changed in (
        {"suite": "t"}, {"version": 2}, {"dataset": "e"}, {"features": "g"}, {"scenario": {"id": "y"}}, {"run": 1},
        {"method": "stata"}, {"options": {"a": 1}},
    ):  # fmt: skip
        assert key({**run, **changed}) != key(run)


def test_a_folder_that_cannot_be_written_gets_a_sentence(tmp_path):
    with pytest.raises(FileError, match=r"No record can be written to .*missing: No such file or directory"):
        Log(tmp_path / "missing", "s").write({})


def test_the_environment_can_be_written():
    assert json.loads(json.dumps(environment())) == environment()
