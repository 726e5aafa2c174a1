"""A log of any length, read once in constant memory: which causes it names, where first, how often, on which ranks.

Most lines of a log differ from others in their numbers alone, and thousands of ranks say the same: a line without its
digits is its kind, and a kind is looked at once. A kind whose digits say what it is (`Errno`, Xid) is looked at again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import BinaryIO

from moekit.doctor.causes import UNNAMED, causes, first, patterns
from moekit.doctor.hang import Collectives

TRIGGERS = (
    b"rror,ailed,rrno,nvalid,not ,must,ignal,nable to,ailure,only ,Xid,nexpected,imed out,device,ismatch,"
    b"FAILED,DUE TO,requires,oom,peer,atchdog,emory,ocket,lready,connect to,xception,CANCELLED,refused,"
    b"Requests,gated,retries,equested,Stale,was lost,open files,attribute,file lock,nrecognized,ndefined,"
    b"Never,exitcode,too long,execve,fallen,RPC,too old,compatib,insufficient,detected,NVIDIA driver,"
    b"egmentation,out of range,EDAC,terminate,degrade,escheduled,NVSHMEM,aborted,EADDRINUSE,require ,"
    b"file size,unauthorized,Should,different,locked,quota,overlap_moe,NaN,DeepEP,last completed,issing,"
    b"nknown,mlx,Please use,Ninja,CUDA GPUs,o space,ouldn,lugin"
).split(b",")
"""Short texts of which every cause's messages have one: most lines that are new have none, which is told fast."""


def _any_of(words: Iterable[bytes]) -> re.Pattern[bytes]:
    """An expression that any of them matches; by their first byte, which is three times as fast."""
    rests: dict[bytes, list[bytes]] = {}
    for word in words:
        rests.setdefault(word[:1], []).append(re.escape(word[1:]))
    return re.compile(b"|".join(re.escape(one) + b"(?:" + b"|".join(rest) + b")" for one, rest in rests.items()))


_TRIGGER = _any_of(TRIGGERS)
_BLOCK_BYTES = 1 << 20
_LONGEST_LINE = 1 << 14
"""Bytes of a line that are looked at; a log may have lines of megabytes."""
_MOST_KINDS = 1 << 16
_LONGEST_KIND = 256
"""Bytes; longer ones are not remembered, so that memory stays bounded."""
_MOST_RANKS = 1 << 16
_MOST_HOSTS = 64
_DIGITS = b"0123456789"
_BY_NUMBER = _any_of(
    b"Errno,Received,Xid,Client Error,ignal,exitcode,code: ,RC:,FAILED,Libfabric,GLIBC,CXXABI,FABRIC".split(b",")
)
"""Kinds whose digits say what they are."""
_EXCEPTION = re.compile(
    rb"^(?:\[rank\d+\]: ?|\d+: ?|\[\w+\]: ?)*(?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception)(?:: |$)"
)
_RANK = re.compile(rb"\[rank(\d+)\]|\[Rank (\d+)\]|\bRank (\d+)[\],]|\bon rank (\d+)\b|^(\d+): ")
_HOST = re.compile(
    rb"^(?:\d+: )?([A-Za-z][\w.-]*):\d+:\d+ \[\d+\] NCCL"
    rb"|slurmstepd-([\w.-]+): error|node ([\w.-]+), device"
)
_PROGRESS = b" elapsed time per iteration "
"""In the line that Megatron prints of a step (megatron/training/training.py, `training_log`)."""


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


@dataclass
class Triage:
    """What a log says."""

    lines: int = 0
    bytes: int = 0
    last_progress: int = 0
    """The last line on which a step was logged; 0 for none."""
    hits: dict[str, Hit] = field(default_factory=dict)
    collectives: Collectives = field(default_factory=Collectives)

    @property
    def found(self) -> list[Hit]:
        """The causes as they are to be told, the first cause first; without exceptions that training went on after."""
        kept = {key: hit for key, hit in self.hits.items() if not (key in _PASSING and self.went_on(hit))}
        return [kept[key] for key in first((key, hit.line_number) for key, hit in kept.items())]

    def went_on(self, hit: Hit) -> bool:
        """Whether steps were logged after the last line that says so."""
        return self.last_progress > hit.last_line_number


_PASSING = (
    UNNAMED,
    "hub_rate_limit",
    "hub_unreachable",
    "database_locked",
    "hub_auth",
    "nccl_remote",
    "cache_race",
    "missing_file",
)
"""What may be caught and tried again."""


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


class _Reader:
    def __init__(self, triage: Triage, resumed: bool) -> None:
        self.triage = triage
        self._resumed = resumed
        self._dull: set[bytes] = set()
        """Kinds that name no cause."""
        self._telling: dict[bytes, str] = {}
        """The causes of those that do."""
        self._every, self._each = patterns()

    def take(self, block: bytes) -> None:
        """Whole lines."""
        before = self.triage.lines
        kinds = block.translate(None, _DIGITS).split(b"\n")
        if not self._dull.issuperset(kinds):
            if len(self._dull) + len(self._telling) > _MOST_KINDS:
                self._dull.clear()
                self._telling.clear()
            for at, (kind, line) in enumerate(zip(kinds, block.split(b"\n"), strict=True), before + 1):
                if kind not in self._dull and (key := self._cause(kind, line[:_LONGEST_LINE])):
                    self._hit(key, line[:_LONGEST_LINE], at)
        self.triage.lines = before + len(kinds) - 1
        if (progress := block.rfind(_PROGRESS)) >= 0:
            self.triage.last_progress = self.triage.lines - block.count(b"\n", progress) + 1

    def _cause(self, kind: bytes, line: bytes) -> str:
        """The cause that a line names; empty for none."""
        known = self._telling.get(kind)
        if known is not None:
            return known
        key = self._judge(line)
        if len(kind) <= _LONGEST_KIND and not _BY_NUMBER.search(kind):
            if key:
                self._telling[kind] = key
            else:
                self._dull.add(kind)
        return key

    def _judge(self, line: bytes) -> str:
        if _TRIGGER.search(line) and self._every.search(line):
            for key, pattern in self._each:
                if pattern.search(line):
                    return "" if causes()[key].when_resumed and not self._resumed else key
        return UNNAMED if (b"Error" in line or b"Exception" in line) and _EXCEPTION.match(line) else ""

    def _hit(self, key: str, line: bytes, number: int) -> None:
        hit = self.triage.hits.get(key)
        if hit is None:
            text = line.decode("utf-8", "replace").strip()
            hit = self.triage.hits[key] = Hit(key, number, text[:400], number)
        hit.count += 1
        hit.last_line_number = number
        rank = -1
        if (found := _RANK.search(line)) and found.lastindex:
            rank = int(found[found.lastindex])
            if len(hit.ranks) < _MOST_RANKS:
                hit.ranks.add(rank)
        if (host := _HOST.search(line)) and host.lastindex and len(hit.hosts) < _MOST_HOSTS:
            hit.hosts.setdefault(host[host.lastindex].decode(errors="replace"))
        if key in ("watchdog_timeout", "watchdog_report", "gloo_timeout"):
            self.triage.collectives.take(line, rank)
