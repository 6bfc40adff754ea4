"""Work divided among processes with one thread each, which end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from moontide.errors import ResourceError

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "BLIS_NUM_THREADS")

Job = TypeVar("Job")
Answer = TypeVar("Answer")


def in_processes(worker: Callable[[Job], Answer], jobs: Sequence[Job], processes: int) -> Iterator[Answer]:
    """Yield the answers of a worker, of which every process gets a copy, in the order of their arrival.

    >>> list(in_processes(len, [], 2))
    []
    """
    if not jobs:
        return
    others = multiprocessing.active_children()
    context = multiprocessing.get_context("spawn")  # fresh interpreters, which read the thread settings
    with _one_thread(), ProcessPoolExecutor(processes, context, _start, (worker,)) as pool:
        try:
            with _deaf_to_interrupts():
                waiting = [pool.submit(_do, job) for job in jobs]
            for done in as_completed(waiting):
                yield done.result()
        except BrokenProcessPool:
            raise ResourceError(
                "A worker process was killed, usually for lack of memory. The records are"
                " safe: run the same command again with fewer '--jobs'."
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                if child not in others:
                    child.terminate()
            raise


_worker: Callable[[Any], Any]


def _start(worker: Callable[[Any], Any]) -> None:
    global _worker
    _worker = worker
    warnings.simplefilter("ignore", UserWarning)  # the parent has read the same files and warned
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent has ended, even by kill -9."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _do(job: Any) -> Any:
    return _worker(job)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach, not even while they load: their parent ends them.

    A blocked signal stays blocked in a new process, and reaches this one afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starting it would end the blocking
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Set the variables that BLAS libraries read when they are loaded, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
