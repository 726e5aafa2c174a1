"""What `dcgmi diag` says of a node, as JSON or as a table, and by its exit code. Pure.

JSON and table as DCGM 3 and 4 print them. The table cuts its warnings into lines of 45 characters, so JSON is asked
for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

_FOUND, _ISOLATE = (226, -30), (205, -51)
"""Exit codes, as a byte and as DCGM's own number: a test failed; and failed so that the GPU is to be taken out."""
_NOT_RUN = {204: "its test program is missing", 203: "its test program was killed", 127: "there is no `dcgmi`"}
_NO_DAEMON = re.compile(r"unable to (?:establish a )?connect|host engine connection invalid|connection refused", re.I)
_CONFIG = 5
"""The severity of what a setting causes, such as persistence mode that is off (dcgm_errors.h, DCGM 4)."""
_STATUS = re.compile(r"^(?:(?P<of>[A-Z]+ ?\d+): )?(?P<status>Pass|Fail|Warn|Skip)(?: - (?P<gpus>GPUs?: .*))?$", re.I)


@dataclass(frozen=True)
class Diag:
    """What a diagnostic came to."""

    state: str
    """`passed`, `warned`, `skipped` (no test ran), `failed` (a test found an error), `no_daemon`, or `not_run`."""
    said: tuple[str, ...] = ()
    """Each failure or warning, or why it was not run."""
    is_setting: bool = False
    """Of a failure: a setting causes all of it, and no GPU is broken."""


@dataclass(frozen=True)
class _Result:
    test: str
    of: str
    status: str
    warnings: tuple[str, ...] = ()
    severities: tuple[int, ...] = ()


def read_diag(text: str, code: Optional[int]) -> Diag:
    """What `dcgmi diag [-j]` printed, and its exit code; None where it was ended for taking too long."""
    if code is None:
        return Diag("not_run", ("it did not end in time",))
    if _NO_DAEMON.search(text):
        return Diag("no_daemon", ("no DCGM daemon answers (`nv-hostengine`, the service nvidia-dcgm)",))
    if code in _NOT_RUN:
        return Diag("not_run", (_NOT_RUN[code],))
    said = _json(text)
    if said is not None:
        body = said.get("DCGM Diagnostic") or said.get("DCGM GPU Diagnostic")
        if isinstance(body, dict) and "runtime_error" in body:
            return Diag("not_run", (f"DCGM says: {_one_line(body['runtime_error'])}",))
        results = list(_of_json(body)) if isinstance(body, dict) else []
    else:
        results = list(_of_table(text))
    return _judged(results, text, code)


def _judged(results: list[_Result], text: str, code: int) -> Diag:
    failed = [result for result in results if result.status == "fail"]
    warned = [result for result in results if result.status == "warn" or (result.warnings and result.status != "fail")]
    if failed:
        severities = [severity for result in failed for severity in result.severities]
        setting = all(severity == _CONFIG for severity in severities)
        if not severities:  # a table tells none
            setting = all("persistence mode" in " ".join(result.warnings).lower() for result in failed)
        return Diag("failed", tuple(dict.fromkeys(map(_sentence, failed))), setting)
    if code in _FOUND + _ISOLATE:
        what = "the GPU is to be isolated" if code in _ISOLATE else "a test failed"
        return Diag("failed", (f"{what}, by exit code {code}; what it printed does not say which",))
    if code or not results:
        why = f"exit code {code}" if code else "its output is none that can be read"
        said = _one_line(text)
        return Diag("not_run", (f"{why}{': ' + said if said else ''}",))
    if warned:
        return Diag("warned", tuple(dict.fromkeys(map(_sentence, warned))))
    if all(result.status == "skip" for result in results):
        return Diag("skipped", ("every test was skipped",))
    return Diag("passed")


def _sentence(result: _Result) -> str:
    place = f"{result.test} on {result.of}" if result.of else result.test
    return f"{place}: {'; '.join(result.warnings) or result.status}"


def _json(text: str) -> Optional[dict[str, Any]]:
    """The JSON object among what was printed; None where there is none that is whole."""
    start = text.find("{")
    if start < 0:
        return None
    try:
        said, _ = json.JSONDecoder().raw_decode(text[start:])
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def _of_json(body: dict[str, Any]) -> Iterator[_Result]:
    for category in _dicts(body.get("test_categories")):
        for test in _dicts(category.get("tests")):
            name = str(test.get("name", "a test"))
            for result in _dicts(test.get("results")):
                warnings, severities = _warnings(result.get("warnings"))
                yield _Result(name, _of(result), str(result.get("status", "")).lower(), warnings, severities)


def _of(result: dict[str, Any]) -> str:
    """What a result is of: `GPU 3`."""
    if "entity_id" in result:
        return f"{result.get('entity_group', 'GPU')} {result['entity_id']}"
    of = result.get("gpu_ids", result.get("gpu_id"))
    return "" if of is None else f"GPU {of}"


def _warnings(said: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Texts and severities; DCGM 3 has a text, or a list, where DCGM 4 has objects."""
    texts, severities = [], []
    for one in said if isinstance(said, list) else [said] if said else []:
        if isinstance(one, dict):
            texts.append(_one_line(one.get("warning", "")))
            if isinstance(one.get("error_severity"), int):
                severities.append(one["error_severity"])
        else:
            texts.append(_one_line(one))
    return tuple(filter(None, texts)), tuple(severities)


def _of_table(text: str) -> Iterator[_Result]:
    test, found, warnings = "", [], {}  # type: ignore[var-annotated]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|") or len(cells) != 2 or line.lstrip().startswith("|-"):
            continue
        key, value = cells
        status = _STATUS.match(value)
        if key.lower().startswith("warning"):
            warned = _spaced(key.partition(":")[2].strip())
            warnings.setdefault((test, warned), []).append(value)
        elif status:
            test = key or test
            of = _spaced(status["of"] or status["gpus"] or "")
            found.append((test, of, status["status"].lower()))
            warned = ""
        elif not key and (test, warned if warnings else "") in warnings:  # the rest of a warning that was cut
            warnings[test, warned].append(value)
    parted = {test for test, of, _ in found if of}
    for test, of, state in found:
        if test in parted and not of:  # the sum of the others
            continue
        said = warnings.get((test, of)) or warnings.get((test, "")) or []
        yield _Result(test, of, state, (" ".join(said),) if said else ())


def _spaced(of: str) -> str:
    """`GPU0`, `GPU: 2` and `GPUs: 0, 1` as JSON has them."""
    return re.sub(r"^([A-Z]+)s?:? ?(?=\d)", r"\1 ", of)


def _dicts(said: Any) -> list[dict[str, Any]]:
    return [one for one in said if isinstance(one, dict)] if isinstance(said, list) else []


def _one_line(said: Any) -> str:
    return " ".join(str(said).split())[:300]
