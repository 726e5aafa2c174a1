"""How many micro batches a stage holds at once (core/pipeline_parallel/schedules.py:900 at 0.19.2)."""

from __future__ import annotations

import numpy as np

from moekit.plan.candidates import Candidates, Floats


def in_flight(c: Candidates) -> Floats:
    """Micro batches whose activations a stage keeps at its worst, in units of all its layers. `# (candidate, stage)`

    With interleaving a stage keeps virtual stages of several micro batches: of two warm-up passes forward to each stage
    behind it, and of a round of the pipeline to each further virtual stage. Where two micro batches are worked on at
    once (`--overlap-moe-expert-parallel-comm`), one frees what the other takes.
    """
    behind = c.pipeline[:, None] - 1 - np.arange(c.layers.shape[1])
    steps = c.micro_batches[:, None].astype(float)
    virtual = c.virtual[:, None]
    chunks = 2 * behind + (virtual - 1) * c.pipeline[:, None] + 1
    interleaved = np.minimum(steps * virtual, chunks) / virtual
    plain = np.minimum(steps, behind + 1)
    held: Floats = np.where(c.exists, np.where(virtual > 1, interleaved, plain), 0.0)
    return held


def last_in_flight(c: Candidates) -> Floats:
    """The same of a stage's last virtual stage, where prediction depths and the output layer are."""
    behind = c.pipeline[:, None] - 1 - np.arange(c.layers.shape[1])
    chunks = np.where(c.virtual[:, None] > 1, 2 * behind + 1, behind + 1)
    held: Floats = np.where(c.exists, np.minimum(c.micro_batches[:, None], chunks), 0).astype(float)
    return held
