"""Make a flag table by running the real parser of a Megatron, installed or checked out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moekit.problems import MoekitError, error

_CHILD = Path(__file__).parent / "read_parser.py"
_DEFAULTS: dict[str, Any] = {"action": "store", "type": "str", "nargs": None, "choices": [], "inferred": False}


def dump_table(source: str, python: str | None = None) -> str:
    """The flag table of a Megatron as the text of a JSON file: the same text for the same Megatron, every time.

    `source` is `installed` or the path of a Megatron-LM checkout; `python` is an interpreter that can import it (its
    torch and numpy), by default this one. Raises `MoekitError` where there is no Megatron or it cannot be imported.
    """
    python = python or sys.executable
    environment = dict(os.environ)
    path = None if source == "installed" else checkout(source)
    if path is None:
        # Else Megatron puts the commit of whatever repository its site-packages lies in behind its version.
        environment["NO_VCS_VERSION"] = "1"
    else:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
    try:
        child = subprocess.run([python, str(_CHILD)], env=environment, capture_output=True, text=True, check=False)
    except OSError as problem:
        raise error(f"`{python}` does not start: {problem.strerror}", "give a Python interpreter") from None
    if child.returncode:
        raise _failure(child.stderr, source, python)
    document = json.loads(child.stdout.splitlines()[-1])
    if path is not None and not Path(document["arguments"]).is_relative_to(path):
        raise error(f"`{python}` imports Megatron from `{document['arguments']}`, not from `{source}`")
    origin = "the installed megatron-core" if path is None else "a Megatron-LM checkout"
    return format_table(document["version"], origin, document["options"])


def checkout(source: str) -> Path:
    """The folder of a Megatron-LM checkout, or a `MoekitError` that says why it is none."""
    path = Path(source)
    if not path.is_dir():
        raise error(f"`{source}` is not a directory", "give a Megatron-LM checkout, or `installed`")
    if not (path / "megatron" / "training" / "arguments.py").is_file():
        raise error(f"`{source}` holds no Megatron: it has no megatron/training/arguments.py")
    return path.resolve()


def _failure(stderr: str, source: str, python: str) -> MoekitError:
    last = (stderr.strip().splitlines() or ["no message"])[-1]
    if source == "installed" and "No module named 'megatron" in last:
        return error(f"no Megatron is installed for `{python}`", "`pip install 'moekit[local]'`, or name a checkout")
    return error(f"the Megatron of `{source}` does not import: {last}", f"it was run with `{python}`")


def format_table(version: str, source: str, options: Mapping[str, Mapping[str, Any]]) -> str:
    """A table as text: one option a line, sorted, without the fields that equal their default."""
    lines = []
    for name, fields in sorted(options.items()):
        defaults = _DEFAULTS | {"dest": name.removeprefix("--").replace("-", "_")}
        kept = {key: value for key, value in fields.items() if key not in defaults or defaults[key] != value}
        lines.append(f"{json.dumps(name)}: {json.dumps(kept, sort_keys=True)}")
    header = f'"version": {json.dumps(version)},\n"source": {json.dumps(source)},\n'
    return "{\n" + header + '"options": {\n' + ",\n".join(lines) + "\n}\n}\n"
