"""Tokens per CPU second of `moekit data tokenize`: runs `tokenizing.py`, with its arguments.

This folder is the first on the path of every script in it, and what they import means another `tokenize`: under that
name, this is Python's own.
"""

import importlib.util
import runpy
import sys
import sysconfig
from pathlib import Path

if __name__ == "__main__":
    sys.path.pop(0)
    runpy.run_path(str(Path(__file__).with_name("tokenizing.py")), run_name="__main__")
else:
    spec = importlib.util.spec_from_file_location(__name__, Path(sysconfig.get_path("stdlib"), "tokenize.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[__name__] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[__name__])
