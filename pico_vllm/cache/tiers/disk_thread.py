"""DiskThread: reads and writes of the disk tier, one at a time, beside the engine. Host only.

Reads come before writes: somebody waits for them. What is done is told by `poll`, on the caller's
thread, so that all books are kept there.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

Job = Callable[[], None]
Done = Callable[[], None]


class DiskThread:
    def __init__(self, *, is_threaded: bool = True) -> None:
        """is_threaded False runs the jobs when `poll` is called, for tests."""
        self._reads: deque[tuple[Job, Done]] = deque()
        self._writes: deque[tuple[Job, Done]] = deque()
        self._done: deque[Done] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_busy = False
        self._thread: threading.Thread | None = None
        if is_threaded:
            # A daemon: a disk that never answers keeps no process alive.
            self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
            self._thread.start()

    @property
    def num_writes(self) -> int:
        """That nobody has begun."""
        return len(self._writes)

    def read(self, job: Job, done: Done) -> None:
        self._submit(self._reads, job, done)

    def write(self, job: Job, done: Done) -> None:
        self._submit(self._writes, job, done)

    def _submit(self, line: deque[tuple[Job, Done]], job: Job, done: Done) -> None:
        with self._changed:
            line.append((job, done))
            self._changed.notify_all()

    def poll(self) -> None:
        """Call what is to be called after the jobs that are done."""
        if self._thread is None:
            while self._reads or self._writes:
                self._do((self._reads or self._writes).popleft())
        while self._done:
            self._done.popleft()()

    def wait(self, timeout_s: float) -> None:
        """Until a job is done, or for so long."""
        if self._thread is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._done, timeout_s)

    def wait_until_idle(self, timeout_s: float) -> None:
        """Until nothing is left to do, or for so long."""
        if self._thread is None:
            self.poll()
            return
        with self._changed:
            self._changed.wait_for(
                lambda: not (self._reads or self._writes or self._is_busy), timeout_s
            )

    def close(self, timeout_s: float) -> None:
        """Let what is in line end, for so long; the rest is not done."""
        self.wait_until_idle(timeout_s)
        if self._thread is None:
            return
        with self._changed:
            self._reads.clear()
            self._writes.clear()
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._reads or self._writes or self._is_closing)
                if self._is_closing:
                    return
                work = (self._reads or self._writes).popleft()
                self._is_busy = True
            self._do(work)

    def _do(self, work: tuple[Job, Done]) -> None:
        job, done = work
        try:
            job()
        except Exception:
            # Nothing was promised: `done` finds what it looks for missing.
            logger.exception("kv_disk_job_failed")
        with self._changed:
            self._done.append(done)
            self._changed.notify_all()
