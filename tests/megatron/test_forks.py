"""Work in forks: order, ends that are no answers, and nothing left running."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from moekit.megatron.forks import AHEAD, ServerError, ask_each, in_a_fork

SERVER = """
import os, sys, time
from moekit.megatron.forks import serve

def answer(question):
    time.sleep(question.get("seconds", 0))
    return {"pid": os.getpid(), **question}

serve(map(int, sys.argv[1:]), answer)
"""


def ask(questions: Iterator[Any], at_once: int = 2, server: str = SERVER) -> Iterator[Any]:
    return ask_each([sys.executable, "-c", server], os.environ, questions, at_once)


def test_answers_keep_the_order_of_their_questions_and_share_the_workers() -> None:
    answers = list(ask(iter([{"n": n, "seconds": 0.2 if n == 0 else 0} for n in range(20)])))
    assert [answer["n"] for answer in answers] == list(range(20))
    assert len({answer["pid"] for answer in answers}) == 2
    assert sum(answer["pid"] == answers[0]["pid"] for answer in answers) < 10, "the slow one holds up its worker alone"


def test_questions_are_read_only_so_far_ahead() -> None:
    read: list[int] = []

    def questions() -> Iterator[dict[str, int]]:
        for n in range(10 * AHEAD):
            read.append(n)
            yield {"n": n}

    for answer in ask(questions()):
        assert len(read) <= answer["n"] + AHEAD + 1
    assert len(read) == 10 * AHEAD


def test_who_stops_asking_leaves_no_process() -> None:
    answers = ask(iter([{"n": 0}, {"n": 1, "seconds": 60}]), at_once=1)
    worker = next(answers)["pid"]
    started = time.monotonic()
    answers.close()  # type: ignore[attr-defined]
    assert time.monotonic() - started < 30
    deadline = time.monotonic() + 10
    while alive(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_that_ends_says_why() -> None:
    with pytest.raises(ServerError, match="no such thing") as ended:
        list(ask(iter([{}]), server="import sys; print('no such thing', file=sys.stderr); sys.exit(3)"))
    assert ended.value.code == 3


def first_then(end: Any) -> Any:
    def work() -> Iterator[dict[str, int]]:
        yield {"n": 1}
        end()

    return work


def test_a_fork_that_does_not_end_well_keeps_what_it_said() -> None:
    assert in_a_fork(lambda: iter([{"n": 1}, {"n": 2}]), 30) == ([{"n": 1}, {"n": 2}], "")
    assert in_a_fork(first_then(lambda: time.sleep(60)), 0.5) == ([{"n": 1}], "time")
    assert in_a_fork(first_then(lambda: os.kill(os.getpid(), signal.SIGKILL)), 30) == ([{"n": 1}], "signal 9")
    assert in_a_fork(first_then(lambda: os._exit(7)), 30) == ([{"n": 1}], "exit code 7")


def test_an_exception_in_a_fork_is_ours() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        in_a_fork(lambda: iter([{"n": 1 // n} for n in range(1)]), 30)
