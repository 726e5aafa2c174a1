"""Work in copies of a process that took seconds to set up: every piece in a fork of its own, which it may spoil.

The parent asks a server, a child process with one socket a worker; a worker is a fork of the server's that forks again
for every line it reads. Lines are JSON.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import select
import signal
import socket
import subprocess
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TextIO

from moekit.lifeline import die_with_parent

AHEAD = 64
"""How many questions are read ahead of the answers: memory stays constant however many there are."""


class ServerError(Exception):
    """The server ended; `code` is its exit code and the text what it wrote to standard error."""

    def __init__(self, code: int, stderr: str) -> None:
        super().__init__(stderr)
        self.code = code


def ask_each(
    command: Sequence[str], environment: Mapping[str, str], questions: Iterable[Any], at_once: int
) -> Iterator[Any]:
    """The server's answer to every question, in order, as they come; `command` gets the sockets' numbers.

    Raises `ServerError`. Nothing of the server outlives the iterator.
    """
    ours, theirs = zip(*(socket.socketpair() for _ in range(at_once)), strict=True)
    numbers = [str(end.fileno()) for end in theirs]
    with tempfile.TemporaryFile("w+") as stderr, contextlib.ExitStack() as stack:
        server = subprocess.Popen(
            [*command, *numbers],
            env=environment,
            pass_fds=[end.fileno() for end in theirs],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
        stack.callback(_end, server)
        for end in theirs:
            end.close()
        free: queue.SimpleQueue[TextIO] = queue.SimpleQueue()
        for end in ours:
            file = end.makefile("rw")
            stack.callback(_close, file)
            free.put(file)
            end.close()

        def ask(question: Any) -> Any:
            text = json.dumps(question) + "\n"
            line = free.get()
            try:
                line.write(text)
                line.flush()
                answer = line.readline()
            except OSError:
                answer = ""
            free.put(line)
            if not answer:
                code = server.wait()
                stderr.seek(0)
                raise ServerError(code, stderr.read())
            return json.loads(answer)

        pool = stack.enter_context(ThreadPoolExecutor(at_once))
        stack.callback(_end, server)  # before the pool waits for its threads
        pending: deque[Future[Any]] = deque()
        for question in questions:
            pending.append(pool.submit(ask, question))
            while pending and (len(pending) >= AHEAD or pending[0].done()):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _close(file: TextIO) -> None:
    """Close what leads to a server that may be gone, with a question that it did not take."""
    with contextlib.suppress(OSError):
        file.close()


def _end(server: subprocess.Popen[bytes]) -> None:
    """Kill the server with its workers and their forks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def serve(sockets: Iterable[int], answer: Callable[[Any], Any]) -> None:
    """One worker for each socket: `answer` to every line, until the other end closes."""
    die_with_parent()
    gc.collect()
    gc.freeze()  # the garbage collector writes to nothing that forks share
    numbers = list(sockets)
    workers = []
    for number in numbers:
        worker = os.fork()
        if worker == 0:
            try:
                die_with_parent()
                for other in numbers:
                    if other != number:
                        os.close(other)
                with socket.socket(fileno=number) as end, end.makefile("rw") as lines:
                    for line in iter(lines.readline, ""):
                        lines.write(json.dumps(answer(json.loads(line))) + "\n")
                        lines.flush()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        workers.append(worker)
    for number in numbers:
        os.close(number)
    codes = [os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers]
    if any(codes):
        raise SystemExit(1)


def in_a_fork(work: Callable[[], Iterator[Any]], limit_s: float) -> tuple[list[Any], str]:
    """What `work` yields in a copy of this process, and why it came to no end: "", "time", "signal 9", "exit code 1".

    What the copy prints is lost. Raises RuntimeError with the traceback of an exception that `work` raises.
    """
    return in_forks([work], limit_s)[0]


def in_forks(
    works: Sequence[Callable[[], Iterator[Any]]], limit_s: float, grace_s: float = 0.0
) -> list[tuple[list[Any], str]]:
    """`in_a_fork` for copies that work together: when one has ended, the others have `grace_s` seconds left."""
    children: list[int] = []
    pipes: list[int] = []
    for work in works:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            for other in pipes:
                os.close(other)
            _work(work, reading, writing)
        os.close(writing)
        children.append(child)
        pipes.append(reading)
    texts, ended = _read(pipes, time.monotonic() + limit_s, grace_s)
    for child, in_time in zip(children, ended, strict=True):
        if not in_time:
            os.kill(child, signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return [_outcome(*of_one) for of_one in zip(texts, ended, codes, strict=True)]


def _outcome(text: str, in_time: bool, code: int) -> tuple[list[Any], str]:
    values = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    if not in_time:
        return values, "time"
    if values and isinstance(values[-1], str):  # a value of ours is no text
        raise RuntimeError(values[-1])
    return values, "" if code == 0 else f"signal {-code}" if code < 0 else f"exit code {code}"


def _work(work: Callable[[], Iterator[Any]], reading: int, writing: int) -> None:
    """In the copy: write a line for each value, and end."""
    code = 1
    try:
        die_with_parent()
        os.close(reading)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        with os.fdopen(writing, "w") as pipe:
            try:
                for value in work():
                    pipe.write(json.dumps(value) + "\n")
                    pipe.flush()
                code = 0
            except BaseException:
                pipe.write(json.dumps(traceback.format_exc()) + "\n")
    finally:
        os._exit(code)


def _read(pipes: Sequence[int], deadline: float, grace_s: float) -> tuple[list[str], list[bool]]:
    """All that comes from each pipe before its other end closes, and whether it did before `deadline`.

    Once one has closed, the others have `grace_s` seconds at most.
    """
    parts: dict[int, list[bytes]] = {pipe: [] for pipe in pipes}
    opened = list(pipes)
    while opened and (left := deadline - time.monotonic()) > 0:
        for pipe in select.select(opened, [], [], left)[0]:
            if part := os.read(pipe, 65536):
                parts[pipe].append(part)
            else:
                if len(opened) == len(pipes):
                    deadline = min(deadline, time.monotonic() + grace_s)
                opened.remove(pipe)
    for pipe in pipes:
        os.close(pipe)
    return [b"".join(parts[pipe]).decode() for pipe in pipes], [pipe not in opened for pipe in pipes]
