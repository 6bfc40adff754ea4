"""Stores of both kinds, an application in this process, and servers of their own process on loopback."""

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from moontide import registry
from moontide.encoders import Encoder
from moontide.serve.auth import Gate
from moontide.serve.databases import open_store
from moontide.serve.server import Server as InThread
from moontide.serve.server import listen
from moontide.serve.service import Service


def load_module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PREFORK = Path(__file__).with_name("prefork.py")
Forked = load_module(PREFORK).Forked
SERVER = "import sys; from moontide.cli import main; sys.exit(main())"
K, D = 5, 8


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(name="free_port")
def free_port_fixture():
    return free_port


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL cluster of this test run; yields a function that empties its database and returns its URL."""
    folders = [Path(path).parent for path in [shutil.which("initdb")] if path]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    psycopg = pytest.importorskip("psycopg", reason="the extra 'postgres' is not installed")
    if not folders:
        pytest.skip("PostgreSQL is not installed")
    programs, port = folders[-1], free_port()
    # The server refuses to run as root: give it to a user without rights.
    user = {"user": pwd.getpwnam("nobody").pw_uid, "group": pwd.getpwnam("nobody").pw_gid} if os.getuid() == 0 else {}
    with tempfile.TemporaryDirectory(prefix="pg") as folder:
        os.chmod(folder, 0o777)

        def run(program, *arguments):
            command = [str(programs / program), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, cwd="/", **user)
            assert done.returncode == 0, done.stdout + done.stderr

        data = f"{folder}/data"
        run("initdb", "-D", data, "-U", "moontide", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
        run("pg_ctl", "-D", data, "-o", options, "-l", f"{folder}/log", "-w", "start")
        url = f"postgresql://moontide@127.0.0.1:{port}/postgres"

        def make():
            with psycopg.connect(url, autocommit=True) as connection:
                others = "FROM pg_stat_activity WHERE datname = 'postgres' AND pid <> pg_backend_pid()"
                connection.execute(f"SELECT pg_terminate_backend(pid, 10000) {others}")
                connection.execute("DROP SCHEMA public CASCADE")
                connection.execute("CREATE SCHEMA public")
            return url

        yield make
        run("pg_ctl", "-D", data, "-m", "immediate", "stop")


@pytest.fixture(params=["sqlite", "postgres"])
def data(request, tmp_path):
    """A place for the data of a server, of each kind."""
    return str(tmp_path / "data") if request.param == "sqlite" else request.getfixturevalue("postgres")()


@pytest.fixture
def store(data):
    opened = open_store(data, "never")
    yield opened
    opened.close()


@pytest.fixture
def sqlite(tmp_path):
    return str(tmp_path / "data")


class Colour(Encoder):
    """A small encoder that is one: the mean colour of an image, and the colours that names mean."""

    id, dim, logit_scale, preprocessing = "colour", D, 20.0, "mean colour"
    names = ("red", "green", "blue")

    def prepare(self, image):
        return {"mean": np.asarray(image.resize((1, 1)), dtype=np.float32).reshape(3)}

    def _images(self, batch):
        return np.stack([np.pad(one["mean"], (0, D - 3)) for one in batch]) + 1

    def _text(self, prompts):
        known = [[name in prompt for name in self.names] for prompt in prompts]
        return np.stack([np.eye(D)[row.index(True) if any(row) else D - 1] for row in known])


@contextlib.contextmanager
def serving(data, tokens=None, **options):
    gate = Gate(tokens or {}, **{k: options.pop(k) for k in ("max_body", "body_seconds") if k in options})
    store = open_store(data, options.pop("fsync", "never"))
    for name, token in (tokens or {}).items():
        store.put_token(name, token.write())
    service = Service(store, gate=gate, **options)
    server, listening = InThread(service), listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=120) as client:
        client.service, client.server = service, server
        yield client
    server.should_exit = True
    thread.join()
    assert not server.lifespan.should_exit  # start and end went well


@pytest.fixture
def app():
    """Return a function that serves a store from a thread of this process, and gives a client of it."""
    with contextlib.ExitStack() as stack:
        yield lambda data, **options: stack.enter_context(serving(data, **options))


@pytest.fixture(scope="session", name="serving")
def serving_fixture():
    return serving


@pytest.fixture(scope="module")
def shared_app(tmp_path_factory):
    """A server with an encoder that the tests of a module share."""
    with serving(str(tmp_path_factory.mktemp("data")), encoder=Colour(), max_body=200_000) as client:
        yield client


class Server:
    """`moontide serve` in a process of its own, started from nothing where there is no `prefork`."""

    def __init__(self, data, *arguments, port=0, prefork=None):
        arguments = ["serve", "--port", str(port), "--data", data, *map(str, arguments)]
        if prefork is None:
            command = [sys.executable, "-c", SERVER, *arguments]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        else:
            self.process = Forked(prefork, arguments)
        line = self.process.stdout.readline()
        assert line.startswith("Moontide at "), self.process.communicate()
        self.url = line.split()[2]
        self.port = int(self.url.rpartition(":")[2])
        deadline = time.monotonic() + 30
        with httpx.Client(base_url=self.url) as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/readyz").status_code == 200:
                        return
                time.sleep(0.02)
        raise AssertionError("the server does not get ready")

    def kill(self):
        """End it without a warning."""
        self.process.kill()
        self.process.communicate()

    def stop(self):
        """Ask it to end; returns its exit status and what it said."""
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=40)
        return self.process.returncode, errors


@pytest.fixture(scope="session")
def prefork():
    """The socket of a process that forks servers."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "prefork")
        process = subprocess.Popen([sys.executable, str(PREFORK), path])
        while not os.path.exists(path):
            assert process.poll() is None
            time.sleep(0.02)
        yield path
        process.kill()
        process.wait()


@contextlib.contextmanager
def starting(prefork):
    started = []

    def start(*arguments, **options):
        started.append(Server(*arguments, **{"prefork": prefork, **options}))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture
def serve(prefork):
    """Return a function that starts a server, which ends with the test."""
    with starting(prefork) as start:
        yield start


@pytest.fixture(scope="module")
def server_of(prefork):
    """Return a function that starts a server, which ends with the module."""
    with starting(prefork) as start:
        yield start


@contextlib.contextmanager
def installed():
    """Install the method of `plugin`, which makes use of known labels, as another package would."""
    folder = str(Path(__file__).parent / "plugin")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
        for cached in (registry.method_names, registry.method_type):
            cached.cache_clear()
        yield
    for cached in (registry.method_names, registry.method_type):
        cached.cache_clear()


@pytest.fixture
def learner():
    with installed():
        yield


@pytest.fixture(scope="module")
def learner_of_module():
    with installed():
        yield


@pytest.fixture(scope="session")
def quick():
    """Return a function that gives the options of a method with which a step takes the least time."""

    def options(method, *but):
        specs = registry.method_type(method).specs()
        return {name: 1 for name in ("iterations", "rounds", "steps") if name in specs and name not in but}

    return options


@pytest.fixture
def text():
    return np.random.default_rng(0).normal(size=(K, D)).astype(np.float32)


@pytest.fixture
def samples(text):
    """Make samples near the prototypes."""
    rng = np.random.default_rng(1)

    def draw(n):
        return text[rng.integers(K, size=n)] + 0.7 * rng.normal(size=(n, D)).astype(np.float32)

    return draw


@pytest.fixture(scope="session")
def push():
    """Push embeddings as raw float32."""

    def send(client, stream, x, key=None, **headers):
        headers |= {"Content-Type": "application/octet-stream", "X-Shape": f"{x.shape[0]},{x.shape[1]}"}
        if key is not None:
            headers["Idempotency-Key"] = key
        return client.post(f"/streams/{stream}/embeddings", content=x.astype("<f4").tobytes(), headers=headers)

    return send


@pytest.fixture
def colour():
    return Colour()


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium, driven as in tests/browser."""
    chromium = load_module(Path(__file__).parents[1] / "browser" / "conftest.py")
    if chromium.BROWSER is None:
        pytest.skip("Chromium is not installed")
    tab = chromium.Page()
    yield tab
    tab.close()
