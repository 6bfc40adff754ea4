"""A process that has imported the server and forks one for everybody who asks: a start costs hardly any time.

    python prefork.py SOCKET

A request is JSON of arguments and environment, with the descriptors of its stdout and stderr; the answers are the
number of the process and, when it has ended, its exit status, as text. No thread runs here, so that forking is safe.
"""

import contextlib
import json
import os
import signal
import socket
import sys


def serve(path):
    from moontide.cli import main
    from moontide.serve import app, databases, server, service  # noqa: F401

    with contextlib.suppress(ImportError):
        from moontide.core.backends import _numba  # noqa: F401
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    while True:
        connection, _ = listening.accept()
        if os.fork():
            connection.close()
            continue
        listening.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asked, outputs, _, _ = socket.recv_fds(connection, 2**20, 2)
        if not asked:
            os._exit(0)
        if child := os.fork():
            connection.sendall(f"{child}\n".encode())
            for output in outputs:
                os.close(output)
            connection.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
            os._exit(0)
        connection.close()
        for output, place in zip(outputs, (1, 2), strict=True):
            os.dup2(output, place)
            os.close(output)
        sys.stdout, sys.stderr = (os.fdopen(place, "w", closefd=False) for place in (1, 2))
        arguments, environment = json.loads(asked)
        os.environ.update(environment)
        sys.path[:0] = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
        status = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Forked:
    """A process of `serve`, as `subprocess.Popen` would have it."""

    def __init__(self, path, arguments):
        out, err = os.pipe(), os.pipe()
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(path)
        asked = json.dumps([arguments, dict(os.environ)]).encode()
        socket.send_fds(self.connection, [asked], [out[1], err[1]])
        os.close(out[1])
        os.close(err[1])
        self.stdout, self.stderr = (os.fdopen(end) for end in (out[0], err[0]))
        self.pid, self.returncode = int(b"".join(iter(lambda: self.connection.recv(1), b"\n"))), None

    def poll(self):
        """Return the exit status, or None."""
        if self.returncode is None:
            self.connection.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                self.returncode = int(self.connection.recv(100))
        return self.returncode

    def send_signal(self, number):
        """Send a signal."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """End it without a warning."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=60):
        """Wait for the end; returns what was written."""
        if self.returncode is None:
            self.connection.settimeout(timeout)
            self.returncode = int(self.connection.recv(100))
        printed = self.stdout.read(), self.stderr.read()
        for file in (self.stdout, self.stderr, self.connection):
            file.close()
        return printed


if __name__ == "__main__":
    serve(sys.argv[1])
