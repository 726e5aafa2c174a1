"""A log of any length, read once in constant memory: which causes it names, where first, how often, on which ranks.

Most lines differ from others in their digits alone, and nearly none names a cause: a line without its digits is
looked at once, many of them together, for texts that causes cannot do without (needles.py). Lines alone that have one
are judged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import BinaryIO

from moekit.doctor import sniff
from moekit.doctor.causes import OF_NETWORK, UNNAMED, causes, first, patterns
from moekit.doctor.hang import Collectives
from moekit.doctor.needles import DIGITS, Needles, needles
from moekit.watch import transport

_BLOCK_BYTES = 1 << 20
_LONGEST_LINE = 1 << 14
"""Bytes of a line that are looked at; a log may have lines of megabytes."""
_MOST_KINDS = 1 << 16
_LONGEST_KIND = 256
"""Bytes; longer ones are not remembered, so that memory stays bounded."""
_MOST_RANKS = 1 << 16
_MOST_HOSTS = 64
_EXCEPTION = r"(?:^|[\])]:? ?|: |\| )(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?:: |$)"
_RANK = re.compile(rb"\[rank(\d+)\]|\[Rank (\d+)\]|\bRank (\d+)[\],:]|\bon rank (\d+)\b")
_NAMED_WITHIN = 400
"""Bytes of a line in which its rank and its host are looked for."""
_HOSTS = (
    (b"NCCL ", re.compile(rb"(?<![\w.-])([A-Za-z][\w.-]*):\d+:\d+ \[\d+\] ")),
    (b"slurmstepd-", re.compile(rb"slurmstepd-([\w.-]+): error")),
    (b"srun: error: ", re.compile(rb"srun: error: ([\w.-]+): task")),
    (b" kernel: ", re.compile(rb"(?<![\w.-])([\w.-]+) kernel: ")),
    (b"ode failure on ", re.compile(rb"[Nn]ode failure on ([\w.-]+)")),
    (b" not responding", re.compile(rb"[Nn]ode ([\w.-]+) not responding")),
    (b"node", re.compile(rb"node:? ([\w.-]+), (?:device|gpu)")),
)
"""What a line has that names its host, and where."""
_MILD = re.compile(rb"(?:^|[\s\[:(])(?:W\d|W \w+\.|WARN(?:ING)?\b|[Ww]arning\b|\w+Warning\b|INFO\b|DEBUG\b|NOTE\b)")
"""What marks a line as no failure."""
_RETRIED = re.compile(rb"[Rr]etry(?:ing)? (?:in )?\d|, retry|[Rr]etrying\b|thrown while requesting|[Aa]ttempt \d+ of ")
"""What says that it is tried again; where it fails in the end, another line says so."""
_PROGRESS = b" elapsed time per iteration "
"""In the line that Megatron prints of a step (megatron/training/training.py, `training_log`)."""
_NOTE = "note"
"""No cause, but what a node's network is, or how its GPUs fared in a test."""
_PEAK_SAYS = r" memory \(MB\) \| allocated: "
_PEAK = re.compile(rb"\| max allocated: ([\d.]+)")
_WAITS = ("watchdog_timeout", "watchdog_report", "gloo_timeout")


@dataclass
class Hit:
    """A cause that a log names."""

    key: str
    line_number: int
    """The first of them, from 1."""
    line: str
    last_line_number: int
    count: int = 0
    """Lines that say so."""
    ranks: set[int] = field(default_factory=set)
    hosts: dict[str, None] = field(default_factory=dict)
    mild: bool = True
    """Whether each of them is marked a warning."""


@dataclass
class Triage:
    """What a log says."""

    lines: int = 0
    bytes: int = 0
    last_progress: int = 0
    """The last line on which a step was logged; 0 for none."""
    hits: dict[str, Hit] = field(default_factory=dict)
    collectives: Collectives = field(default_factory=Collectives)
    networks: transport.Networks = field(default_factory=transport.Networks)
    peak_mib: float = 0.0
    """The largest that a rank says it had allocated of its GPU (megatron/training, `report_memory`)."""
    sniff: sniff.SniffTests = field(default_factory=sniff.SniffTests)

    @property
    def found(self) -> list[Hit]:
        """The causes as they are to be told, the first cause first; without those that training passed over."""
        kept = {key: hit for key, hit in self.hits.items() if not self._passed(hit)}
        lines = ((key, hit.line_number) for key, hit in kept.items())
        return [kept[key] for key in first(lines, {key for key, hit in kept.items() if self.went_on(hit)})]

    def went_on(self, hit: Hit) -> bool:
        """Whether steps were logged after the last line that says so, of what would have ended them at once."""
        cause = causes()[hit.key]
        return self.last_progress > hit.last_line_number and cause.tier != "drag" and not cause.lasts

    def _passed(self, hit: Hit) -> bool:
        """Whether it may have been a warning, or be tried again, and training went on; or no network is used."""
        if hit.key in OF_NETWORK and self.networks.needless:
            return True
        return self.went_on(hit) and (hit.mild or causes()[hit.key].tier == "unnamed")


def read_log(stream: BinaryIO, resumed: bool = False) -> Triage:
    """Read a log to its end; `resumed`: other attempts went before."""
    reader = _Reader(Triage(), resumed)
    rest = b""
    while block := stream.read(_BLOCK_BYTES):
        end = block.rfind(b"\n") + 1
        reader.triage.bytes += len(block)
        if not end:  # a line longer than a block, of which the beginning is kept
            rest = (rest + block)[:_LONGEST_LINE]
            continue
        reader.take(rest + block[:end] if rest else block[:end])
        rest = block[end:]
    if rest:
        reader.take(rest + b"\n")
    return reader.triage


@cache
def _expressions() -> tuple[Needles, Needles, list[tuple[str, str]]]:
    """Where to look, where digits say what a line is, and what to look for.

    That is causes in their order, an exception that none names, and lines of the network.
    """
    texts = [
        *patterns(),
        (UNNAMED, _EXCEPTION),
        *((_NOTE, said) for said in (*transport.SAYS, *sniff.SAYS, _PEAK_SAYS)),
    ]
    by_number = [text for _, text in texts if re.search(r"\d|\\d", text)]
    return needles([text for _, text in texts]), needles(by_number), texts


@cache
def _compiled(text: str) -> re.Pattern[bytes]:
    """Of hundreds, a log needs a few."""
    return re.compile(text.encode())


class _Reader:
    def __init__(self, triage: Triage, resumed: bool) -> None:
        self.triage = triage
        self._resumed = resumed
        self._dull: set[bytes] = set()
        """Lines without their digits that name no cause, whatever their digits are."""
        self._known: dict[bytes, str] = {}
        """Of those that do, the cause, where digits do not matter."""
        self._needles, self._by_number, self._each = _expressions()

    def take(self, block: bytes) -> None:
        """Whole lines."""
        kinds = block.translate(None, DIGITS).split(b"\n")
        new = set(kinds) - self._dull
        if new and (telling := self._needles.kinds(new)):
            new -= telling
            lines = enumerate(zip(kinds, block.split(b"\n"), strict=True), self.triage.lines + 1)
            for number, kind, line in [(number, kind, line) for number, (kind, line) in lines if kind in telling]:
                self._line(kind, line, number)
        if len(self._dull) + len(self._known) > _MOST_KINDS:
            self._dull.clear()
            self._known.clear()
        self._dull.update(kind for kind in new if len(kind) <= _LONGEST_KIND)
        self.triage.lines += len(kinds) - 1
        if (progress := block.rfind(_PROGRESS)) >= 0:
            self.triage.last_progress = self.triage.lines - block.count(b"\n", progress) + 1

    def _line(self, kind: bytes, line: bytes, number: int) -> None:
        """A line that may name a cause; of one that a progress bar wrote over, each of what stood there."""
        if b"\r" in line.rstrip():
            for part in line.split(b"\r"):
                self._line(part.translate(None, DIGITS), part, number)
        elif key := self._cause(kind, line[:_LONGEST_LINE].rstrip()):
            self._hit(key, line[:_LONGEST_LINE], number)

    def _cause(self, kind: bytes, line: bytes) -> str:
        """What a line names; empty for none."""
        key = self._known.get(kind)
        if key is not None:
            return key
        key = self._judge(line)
        if len(kind) <= _LONGEST_KIND and not self._by_number.without_digits.search(kind):
            self._known[kind] = key
            if not key:
                self._dull.add(kind)
        return key

    def _judge(self, line: bytes) -> str:
        for candidate in self._needles.within(line):
            key, text = self._each[candidate]
            if _compiled(text).search(line):
                if _RETRIED.search(line):
                    return ""
                return key if key not in causes() or self._resumed or not causes()[key].when_resumed else ""
        return ""

    def _hit(self, key: str, line: bytes, number: int) -> None:
        self.triage.networks.take(line)
        if key in (_NOTE, "gpu_outlier"):
            self.triage.sniff.take(line)
        if key == _NOTE:
            if peak := _PEAK.search(line):
                self.triage.peak_mib = max(self.triage.peak_mib, float(peak[1]))
            return
        hit = self.triage.hits.get(key)
        if hit is None:
            text = line.decode("utf-8", "replace").strip()
            hit = self.triage.hits[key] = Hit(key, number, text[:400], number)
        hit.count += 1
        hit.last_line_number = number
        hit.mild = hit.mild and bool(_MILD.search(line)) and b"NCCL WARN" not in line
        rank = -1
        if (found := _RANK.search(line, 0, _NAMED_WITHIN)) and found.lastindex:
            rank = int(found[found.lastindex])
            if len(hit.ranks) < _MOST_RANKS:
                hit.ranks.add(rank)
        if len(hit.hosts) < _MOST_HOSTS:
            for mark, pattern in _HOSTS:
                if mark in line and (host := pattern.search(line, 0, _NAMED_WITHIN)):
                    hit.hosts.setdefault(host[1].decode(errors="replace"))
        if key in _WAITS:
            self.triage.collectives.take(line, rank)
