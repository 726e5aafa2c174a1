"""The real Megatron of a container image, asked: questions on standard input, answers on standard output.

    python -s /moekit-check/moekit/megatron/in_image.py [CHECKOUT] < questions.json > answers.json

Answers are `{"judge": which Megatron answers, "answers": [verdicts of each question]}`. Beside torch and Megatron this
needs moekit's own folder and the standard library, and nothing that lies beside that folder gets in: neither the login
node's packages nor the home directory's (`-s`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path


def _find_moekit() -> None:
    """Let `moekit` be imported from where this file lies, and nothing that lies beside it."""
    folder = Path(__file__).resolve().parents[1]
    file = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location("moekit", file, submodule_search_locations=[str(folder)])
    assert spec
    assert spec.loader
    sys.modules["moekit"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def main() -> None:
    """Answer, and end with 3 where there is no Megatron."""
    output = os.dup(1)
    os.dup2(2, 1)  # what Megatron prints goes to standard error
    # before torch: forks with threads would wait for ever
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    del sys.path[0]  # this file's folder
    checkout = sys.argv[1] if sys.argv[1:] else None
    if checkout:
        sys.path.insert(0, checkout)
    _find_moekit()
    from moekit.megatron.installed import find_judge
    from moekit.megatron.real import answer
    from moekit.megatron.stages import Question, load

    asked = [Question(**fields) for fields in json.load(sys.stdin)]
    if (judge := find_judge(checkout)) is None:
        print(f"no Megatron in {checkout or sys.executable}", file=sys.stderr)
        raise SystemExit(NO_MEGATRON)
    try:
        load()
    except ImportError as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        raise SystemExit(NO_MEGATRON) from None
    said = {"judge": asdict(judge), "answers": [answer(question) for question in asked]}
    with os.fdopen(output, "w") as pipe:
        json.dump(said, pipe)


NO_MEGATRON = 3
"""The exit status where Megatron cannot be imported."""


if __name__ == "__main__":
    main()
