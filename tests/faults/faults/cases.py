"""The table of faults: each at its points, with what is to follow."""

from __future__ import annotations

from faults.of_files import checkpoints, files
from faults.of_machines import disk, nodes, processes, slurm, the_job
from faults.of_training import again_and_again, failures, wrong_results

CASES = [
    *processes(),
    *nodes(),
    *the_job(),
    *slurm(),
    *disk(),
    *checkpoints(),
    *files(),
    *failures(),
    *again_and_again(),
    *wrong_results(),
]
"""All of them; names are unique (a test)."""
