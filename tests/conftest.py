import ast
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected texts kept beside the tests")


def pytest_configure() -> None:
    """Programs that tests run get no width of a terminal from here: xdist's processes have one."""
    os.environ.pop("COLUMNS", None)


def room(nodeid: str) -> str:
    """The folder of a test; one machine has one Slurm."""
    folder = nodeid.split("/")[1]
    return "slurm" if folder == "faults" else folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits more than it computes comes first."""
    items.sort(key=lambda item: room(item.nodeid) != "slurm")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """A folder's tests go to one of the processes, which prepares once what they share."""
    from xdist.scheduler import LoadScopeScheduling

    class ByRoom(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return room(nodeid)

    return ByRoom(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skip is a failure: what is not run is not held."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
    return report


@pytest.fixture
def golden_file(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compare a text with the file that keeps it; a missing file fails."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.is_file(), f"{path} is missing: pytest --update-golden writes it"
        assert text == path.read_text()

    return compare


@pytest.fixture
def unreached() -> Callable[[list[Path], set[str], Callable[[], None]], list[str]]:
    """Which calls of some names, in some source files, a run does not reach, as `file:line`."""

    def find(sources: list[Path], names: set[str], run: Callable[[], None]) -> list[str]:
        watched = {str(path) for path in sources}
        reached: set[tuple[str, int]] = set()

        def line_runs(code: object, line: int) -> object:
            file = code.co_filename  # type: ignore[attr-defined]
            if file in watched:
                reached.add((file, line))
            return sys.monitoring.DISABLE

        tool, events = sys.monitoring.PROFILER_ID, sys.monitoring.events.LINE
        sys.monitoring.use_tool_id(tool, "unreached")
        sys.monitoring.register_callback(tool, events, line_runs)
        sys.monitoring.set_events(tool, events)
        try:
            run()
        finally:
            sys.monitoring.set_events(tool, 0)
            sys.monitoring.free_tool_id(tool)
        return [
            f"{path.name}:{first}"
            for path in sources
            for first, lines in _calls(path, names).items()
            if not any((str(path), line) in reached for line in lines)
        ]

    return find


def _calls(path: Path, names: set[str]) -> dict[int, range]:
    """For every call of one of `names` in a file, its first line and the lines it stands on.

    One that only passes arguments on, `MoekitError(*problems)`, is none.
    """
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        if named and not all(isinstance(argument, ast.Starred) for argument in node.args):
            found[node.lineno] = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return found
