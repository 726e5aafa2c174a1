"""Stops a launch whose NCCL took sockets: `python3 -m preflight.watching PID ATTEMPT NODE...`.

Beside the training, it follows `ATTEMPT/train.log` until every node has said which network it took, or a step is
logged. Where a node took TCP and the fabric is another, it writes `ATTEMPT/refused.json` and has srun, the process PID,
end all tasks: a SIGTERM is that order.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .baselines import write_json
from .findings import bad_nodes, refusal
from .network import Network, judge_network

_EVERY_S = 1.0
_OTHERS_S = 20.0
"""So long after the first socket the other nodes are heard, so that one node is told from all."""


def watch(attempt: Path, fabric: str, nodes: Sequence[str]) -> bool:
    """Follow until it is decided, and whether the launch is to be stopped; the job ends this with the training."""
    if len(nodes) < 2 or fabric == "none" or "network" in os.environ.get("MOEKIT_PREFLIGHT_ACCEPT", "").split(","):
        return False
    network, position, rest, fallback_at = Network(), 0, b"", 0.0
    while True:
        is_training = _size(attempt / "metrics.jsonl") > 0
        with suppress(OSError), (attempt / "train.log").open("rb") as file:
            file.seek(position)
            block = file.read()
            position += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                network.take(line)
        said = [node for node in nodes if (one := network.nodes.get(node.partition(".")[0])) and one.used]
        fallback = any(one.is_socket for one in network.nodes.values())
        fallback_at = fallback_at or (time.monotonic() if fallback else 0.0)
        heard = len(said) == len(nodes) or is_training
        if heard or (fallback and time.monotonic() - fallback_at > _OTHERS_S):
            return _decide(attempt, fabric, network, nodes)
        time.sleep(_EVERY_S)


def _decide(attempt: Path, fabric: str, network: Network, nodes: Sequence[str]) -> bool:
    findings = [one for one in judge_network(fabric, network.nodes, nodes) if one.level == "fail"]
    if not findings:
        return False
    bad = bad_nodes(findings, nodes)
    sentence = refusal(findings, bad)
    write_json(attempt / "refused.json", {"by": "network", "sentence": sentence, "bad": bad})
    print(f"the launch is stopped: {sentence}", file=sys.stderr, flush=True)
    return True


def _size(path: Path) -> int:
    with suppress(OSError):
        return os.stat(path).st_size  # noqa: PTH116
    return 0


if __name__ == "__main__":
    of_profile = json.loads(Path("preflight.json").read_text())
    if watch(Path(sys.argv[2]), str(of_profile["fabric"]), sys.argv[3:]):
        os.kill(int(sys.argv[1]), signal.SIGTERM)
