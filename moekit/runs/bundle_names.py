"""Names of machines and people in a text: hosts, also as Slurm lists them, addresses, users."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Iterator

MOST_OF_A_LIST = 4096
"""Hosts of one list that are named."""

_HOST = r"[A-Za-z0-9][\w-]*(?:\.[A-Za-z0-9][\w-]*)*"
_ONE = r"[A-Za-z][\w-]*(?:\[[\d,-]+\][\w-]*)*(?:\.[A-Za-z][\w-]*)*"
_LIST = rf"{_ONE}(?:,{_ONE})*"
_AT = r"(?:\b(?:ssh|scp|sftp|rsync) [^\n]{0,200}?|\bAAAA[\w+/=]+ )"
"""Before `user@host`, of a command or a public key."""
_SAYS_HOSTS = [
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"\b(?:SLURM_\w*NODELIST|SLURM\w*_NODENAME|SLURM_\w*HOST\w*|SLURM_LAUNCH_NODE\w*|HOSTNAME|MASTER_ADDR|"
        r"NodeList|BatchHost|NodeName|ReqNodeList|ExcNodeList|node_?list|hostname|rdzv_endpoint|master_addr)"
        rf"\\?[\"']?\s*[=:]\s*\\?[\"']?({_LIST})",
        rf"--(?:nodelist|exclude|rdzv[-_]endpoint|master[-_]addr)[= \n]\s*[\"']?({_LIST})",
        rf"^#SBATCH\s+-[wx]\s+({_LIST})",
        rf"^\s*host\s*: ({_HOST})(?=$| \()",  # torchrun's table of what failed
        rf"(?:^|\s)({_HOST}):\d+:\d+ \[\d+\] NCCL",
        r"slurmstepd-([\w.]+(?:-[\w.]+)*): ",
        rf"srun: error: ({_LIST}): ",
        rf"(?:Node failure on|node failure:?|CANCELLED ON|JOB \d+ ON|STEP [\d.]+ ON) ({_LIST})",
        rf"\b[Nn]odes?[\"']?(?:,| is| was)?\s*[:=]?\s*[\"'`]?((?=[\w.-]*[\d\[]){_LIST})",
        rf"\bon ((?=[\w.-]*\[){_LIST})",
        rf"(?:tcp|ssh|grpc|gloo)://({_HOST})",
        rf"\[({_HOST})\]:\d{{2,5}}\b",
        rf"(?<![\w.-])[\w.-]{{1,64}}@({_HOST})[:$#]",
        rf"{_AT}(?<![\w.-])[\w.-]{{1,64}}@({_HOST})",
    )
]
_JSON_HOSTS = re.compile(r"\"(?:nodes|exclude|suspects|hosts)\":\s*\[([^\]]*)")
_HOST_BY_SHAPE = re.compile(
    r"(?i)(?<![\w.-])(?:ip-\d+-\d+-\d+-\d+(?:\.[a-z][\w-]*)*"
    r"|[a-z0-9][\w-]*(?:\.[a-z0-9][\w-]*)*\.(?:internal|local|localdomain|lan|cluster|corp|intra))(?![\w-])"
)
_NO_HOSTS = re.compile(
    r"(?i)local(host)?|localdomain|rank[-_]?\d*|none|null|nodes?|the|unknown|true|false|unset|cuda|cpu"
    r"|[\d.]+|.|.*\.(py|so|log|out|cpp|cu|h|json|yaml)"
)
_FILE_ENDS = r"(?:log|out|err|jsonl?|txt|py|sh|yaml|tar|gz|pt|so|0)\b"

_ADDRESS_4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)")
_ADDRESS_6 = re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:]|\.\d)")
_HARDWARE = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{2}:){5,19}[0-9a-fA-F]{2}(?![\w:])")
EMAIL = re.compile(r"(?<![\w.%+-])[\w.%+-]{1,128}@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}")

_USER = r"[A-Za-z][\w.-]{0,63}"
_SAYS_USERS = [
    re.compile(pattern)
    for pattern in (
        rf"\b(?:USER|LOGNAME|USERNAME|SLURM_JOB_USER|UserId|SUDO_USER)\\?[\"']?\s*[=:]\s*\\?[\"']?({_USER})",
        rf"{_AT}(?<![\w.-])({_USER})@{_HOST}",
        rf"\buid=\d+\(({_USER})\)",
        rf"--(?:mail-user|uid)[= ]({_USER})",
        rf"(?<![\w.])({_USER})@{_HOST}[:$#]",
        rf"\\?[\"'](?:user|username|owner|author|entity)\\?[\"']:\s*\\?[\"']({_USER})",
    )
]
HOME = re.compile(r"(?:(?<=/home/)|(?<=/[Uu]sers/))[A-Za-z_][\w.-]*")
"""A user's name in a path."""
_SAYS_ACCOUNT = re.compile(
    rf"(?:--account=|#SBATCH\s+(?:-A|--account)\s+|SLURM_JOB_ACCOUNT\\?[\"']?\s*[=:]\s*\\?[\"']?|\bAccount=)({_USER})"
)
_NO_USERS = re.compile(r"(?i)root|nobody|users?|shared|ubuntu|none|null|slurm|runner|main|.|..")


class Names:
    """Hosts, users and accounts that texts speak of."""

    def __init__(self) -> None:
        self._hosts: set[str] = set()
        """As patterns: a host's name with any number in place of its own, since others are called alike."""
        self.users: set[str] = set()
        self.accounts: set[str] = set()
        self._known: re.Pattern[str] | None = None

    def learn(self, text: str) -> None:
        """Take the names that a text says to be such."""
        for pattern in _SAYS_HOSTS:
            for found in pattern.finditer(text):
                for name in itertools.islice(expand(found[1]), 64):
                    self.add_host(name)
        for found in _JSON_HOSTS.finditer(text):
            for name in re.findall(r"\"([^\"]*)\"", found[1]):
                self.add_host(name)
        for pattern in _SAYS_USERS:
            self.users.update(name for name in pattern.findall(text) if not _NO_USERS.fullmatch(name))
        self.users.update(name for name in HOME.findall(text) if not _NO_USERS.fullmatch(name))
        self.accounts.update(name for name in _SAYS_ACCOUNT.findall(text) if not _NO_USERS.fullmatch(name))

    def add_host(self, name: str) -> None:
        """Take a name that is a host's; its domain is no part of it."""
        short = name.partition(".")[0]
        if not _NO_HOSTS.fullmatch(name) and not _NO_HOSTS.fullmatch(short) and re.search(r"[A-Za-z]", short):
            self._hosts.add(re.sub(r"\d+", r"\\d+", re.escape(short.lower())))
            self._known = None

    def hosts(self, text: str) -> Iterator[tuple[int, int, list[str]]]:
        """(begin, end, names) of each host in a text, or list of hosts; names without their domain."""
        for found in _HOST_BY_SHAPE.finditer(text):
            if not _NO_HOSTS.fullmatch(found[0].partition(".")[0]):
                yield *found.span(), [found[0].partition(".")[0].lower()]
        if not self._hosts:
            return
        if self._known is None:
            words = "|".join(sorted(self._hosts, key=lambda word: (-len(word), word)))
            domain = rf"(?:\.(?!{_FILE_ENDS})[A-Za-z][\w-]*)*"
            self._known = re.compile(rf"(?i)(?<![A-Za-z0-9])((?:{words}))(?![A-Za-z0-9]){domain}")
        for found in self._known.finditer(text):
            yield *found.span(), [found[1].lower()]
        for found in re.finditer(r"(?<![\w.-])[A-Za-z][\w-]*\[\d[\d,-]*\][\w-]*(?:\[[\d,-]+\][\w-]*)*", text):
            names = list(itertools.islice(expand(found[0]), MOST_OF_A_LIST))
            if names and self._known.fullmatch(names[0]):
                yield *found.span(), [name.lower() for name in names]


def expand(listed: str) -> Iterator[str]:
    """The hosts of a list as Slurm writes it: `n[1-3],login`, `r[1-2]-n[01-16]`."""
    for one in re.split(r",(?![^\[]*\])", listed):
        parts = re.split(r"\[([\d,-]+)\]", one)
        choices = [list(_numbers(part)) if at % 2 else [part] for at, part in enumerate(parts)]
        yield from ("".join(words) for words in itertools.product(*choices))


def _numbers(said: str) -> Iterator[str]:
    for part in said.split(","):
        first, _, last = part.partition("-")
        if not first or (last and not last.isdecimal()):
            continue
        end = min(int(last or first), int(first) + MOST_OF_A_LIST)
        yield from (str(number).zfill(len(first)) for number in range(int(first), end + 1))


def addresses(text: str) -> Iterator[tuple[int, int]]:
    """Where addresses of networks and their hardware are in a text, but for a machine's own of itself."""
    for pattern in (_ADDRESS_4, _ADDRESS_6):
        for found in pattern.finditer(text):
            try:
                address = ipaddress.ip_address(found[0])
            except ValueError:
                continue
            if not (address.is_loopback or address.is_unspecified):
                yield found.span()
    for found in _HARDWARE.finditer(text):
        yield found.span()
