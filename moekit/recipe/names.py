"""Which words can name a run, and which environment variables a recipe or a profile may set."""

from __future__ import annotations

import re

RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
"""A run's name is a folder, a job's name and a word of a command line alike."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHELLS_OWN = re.compile(
    r"BASH\w*|EPOCH\w+|COMP_WORDBREAKS|DIRSTACK|ENV|EUID|FUNCNAME|GROUPS|HISTCMD|IFS|LINENO|OLDPWD|OPTARG|OPTIND|PATH"
    r"|PIPESTATUS|POSIXLY_CORRECT|PPID|PWD|S?RANDOM|SECONDS|SHELLOPTS|SHLVL|UID|_"
)


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value must not be written anywhere."""
    return bool(re.search(r"(^|_)(TOKEN|(API)?_?KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", name.upper()))


def variable_problem(name: str) -> tuple[str, str] | None:
    """Why a variable cannot be given by a profile or a recipe, and what can be done; None where it can."""
    if name == "LD_LIBRARY_PATH":
        return "would take the image's own folders away", "list folders in the profile's `library_path`"
    if _SHELLS_OWN.fullmatch(name):
        return "is the job's shell's own", "the profile's `python` names an interpreter" if name == "PATH" else ""
    if name.startswith(("MOEKIT_", "SLURM_", "SBATCH_", "SRUN_")):
        return f"is {'moekit' if name.startswith('MOEKIT_') else 'Slurm'}'s own", ""
    return None
