"""What belongs to a release: workflows, the container, the conda recipe, and one version everywhere."""

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from moontide import __version__ as version
from moontide.store.toml import read_toml

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
PROJECT = read_toml(ROOT / "pyproject.toml")["project"]


def workflow(name):
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def commands(steps):
    return "\n".join(step.get("run", "") for step in steps)


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_every_file_for_github_is_yaml_that_runs_what_exists(path):
    found = yaml.safe_load(path.read_text())
    for job in found.get("jobs", {}).values():
        assert "timeout-minutes" in job
        for script in re.findall(r"scripts/\w+", commands(job["steps"])):
            assert (ROOT / script).exists()
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/checkout@v5"))


def test_the_tests_run_on_every_python_that_is_supported():
    job = workflow("test")["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert PROJECT["requires-python"] == ">=3.10"
    assert "scripts/test" in commands(job["steps"])
    assert "scripts/check" in commands(workflow("test")["jobs"]["check"]["steps"])


def test_wheels_are_built_and_documentation_too():
    assert "python -m build" in commands(workflow("wheels")["jobs"]["build"]["steps"])
    (install,) = re.findall(r"'\.\[(.*)\]'", commands(workflow("docs")["jobs"]["docs"]["steps"]))
    assert set(install.split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_conda_recipe_has_the_version_and_the_requirements_of_the_project():
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == version
    wanted = [re.sub(r"(\w)>=", r"\1 >=", one.split(";")[0]) for one in PROJECT["dependencies"]]
    assert recipe["requirements"]["run"] == [f"python {PROJECT['requires-python']}", *wanted]
    assert recipe["build"]["python"]["entry_points"] == [f"moontide = {PROJECT['scripts']['moontide']}"]


def test_the_container_copies_what_exists_and_what_the_context_has():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") and "--from" not in line for word in line.split()[1:-1]]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == kept
    assert all((ROOT / path).exists() for path in copied)
    (extras,) = [line.partition("=")[2] for line in lines if line.startswith("ARG EXTRAS")]
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_container_is_well_formed():
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def has_docker():
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, timeout=30).returncode == 0


def test_the_container_is_built_and_its_server_answers():
    if not has_docker():
        pytest.skip("there is no Docker daemon")
    tag = "moontide-test"
    subprocess.run(["docker", "build", "-t", tag, str(ROOT)], check=True, capture_output=True, timeout=900)
    started = subprocess.run(["docker", "run", "-d", "--rm", tag], check=True, capture_output=True, text=True)
    name, ask = started.stdout.strip(), "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/readyz')"
    try:
        for _ in range(60):
            done = subprocess.run(["docker", "exec", name, "python", "-c", ask], capture_output=True)
            if done.returncode == 0:
                break
            time.sleep(1)
        assert done.returncode == 0, done.stderr
    finally:
        subprocess.run(["docker", "stop", name], capture_output=True, check=False)
