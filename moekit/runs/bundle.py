"""What one needs to ask for help with a run, in one archive without secrets and names."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import platform
import pwd
import re
import tarfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import moekit
from moekit.launch.rundir import RunDir
from moekit.problems import MoekitError, error
from moekit.runs.bundle_mask import Masker
from moekit.runs.bundle_parts import MOST_OF_A_FILE, Collector, Part

MIB = 1 << 20
_README_BYTES = 64 << 10
_MOST_LEFT_OUT = 200
_TAR_BLOCK = 512
_TAR_END_BYTES = 10240
_CUT_WORD = re.compile(r"[^\s.]\S*\.\.\.(?=[\s`'\")]|$)")
_CUT_ROW = 160
"""Characters; a longer row may quote a line that is cut (moekit/doctor/triage.py, moekit/launch/slurm.py)."""
_HAVE_REASONS = ("exit.txt", "end.json", "decision.json")
_CUT_REASON = re.compile(r"\"(?:[^\"\\]|\\.){1900,}?([^\s\"]+)\"")
"""The last word of an exit record's reason that is as long as one can be (moekit/job/exits.py)."""
_WIDE = 100_000
"""A width at which nothing is wrapped."""
_SHARED_ROOT = re.compile(r"(?m)(?:^|\")(/[^\s\"]*?)/(?:data|tokenizers|runs)/")
"""In a path that a run names."""


@dataclass(frozen=True)
class Bundle:
    """What goes into an archive, masked."""

    name: str
    """Of the archive's folder."""
    parts: list[Part]
    masked: list[str]
    """Sentences: what was masked, how often, how many different ones."""
    left_out: list[str]
    """What is not in it, and why."""

    @property
    def readme(self) -> str:
        """The archive's first file: what is in it, what was masked, what was left out."""
        rows = [
            f"{self.name}: what a run of moekit left, to ask for help with it",
            f"moekit {moekit.__version__}, Python {platform.python_version()}",
            "",
            "masked, the same word for the same name everywhere:",
            *(f"  {row}" for row in self.masked or ["nothing"]),
            "",
            "left out:",
            *(f"  {row}" for row in self.left_out[:_MOST_LEFT_OUT] or ["nothing"]),
        ]
        if len(self.left_out) > _MOST_LEFT_OUT:
            rows.append(f"  and {len(self.left_out) - _MOST_LEFT_OUT:,} more")
        rows += ["", "in it, with the size in bytes:", *(f"  {len(p.text.encode()):>9,}  {p.name}" for p in self.parts)]
        return "\n".join([*rows, ""])


def make(run: RunDir, most_mib: int, profile: str | None) -> Bundle:
    """All that is told of a run, at most `most_mib` MiB of it."""
    collector = Collector(run, most_mib * MIB)
    collector.collect()
    told = _told(run, profile, collector) if not collector.leads_out else []
    if collector.leads_out:  # they would read what it leads to
        collector.left_out.append("why.txt, doctor.txt: a link leads out of the run")
    parts = [*told, *collector.parts]
    masker = _masker(run, parts)
    for part in parts:
        masker.learn(part.text)
        for found in _CUT_REASON.finditer(part.text) if part.name.endswith(_HAVE_REASONS) else ():
            masker.hide(found[1])
    kept, left = [], [masker.mask(row) for row in collector.left_out]
    room = most_mib * MIB - _README_BYTES - _TAR_END_BYTES
    for part in parts:
        masked = Part(_clean(masker.mask(part.name)), masker.mask(part.text))
        size = _TAR_BLOCK + -(-len(masked.text.encode()) // _TAR_BLOCK) * _TAR_BLOCK + len(masked.name.encode())
        if size > room:
            left.append(f"{masked.name}: there is no room for it")
            continue
        room -= size
        kept.append(masked)
    return Bundle(f"moekit-bundle-{_clean(masker.mask(run.path.name))}", kept, masker.told(), left)


def write(bundle: Bundle, out: Path) -> int:
    """Write the archive, the same bytes for the same bundle; how many.

    Raises:
        MoekitError: there is one already, or it cannot be written; then nothing is left of it.
    """
    if out.exists() or out.is_symlink():
        raise error(f"`{out}` exists already", "`--out` gives the archive another name")
    half = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with half.open("xb") as file:
            half.chmod(0o600)
            with (
                gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
            ):
                for part in [Part("README.txt", bundle.readme), *bundle.parts]:
                    data = part.text.encode()
                    info = tarfile.TarInfo(f"{bundle.name}/{part.name}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        half.rename(out)
    except OSError as reason:
        what = f"cannot write `{out}`: {(reason.strerror or str(reason)).lower()}"
        raise error(what, "`--out` names another place; nothing is left of this one") from None
    finally:
        with contextlib.suppress(OSError):
            half.unlink()
    return size


def shown(bundle: Bundle) -> Iterator[str]:
    """All that is in an archive, as text."""
    for part in [Part("README.txt", bundle.readme), *bundle.parts]:
        yield f"==> {part.name} <==\n{part.text}{'' if part.text.endswith(chr(10)) else chr(10)}"


def _told(run: RunDir, profile: str | None, collector: Collector) -> list[Part]:
    """What `moekit why` and `moekit doctor` say. One that breaks says how: a bundle is for when things are broken."""
    parts = []
    commands: dict[str, Callable[[RunDir, str | None], Sequence[str]]] = {"why.txt": _why, "doctor.txt": _doctor}
    for name, command in commands.items():
        try:
            text = "\n".join([*command(run, profile), ""])
        except MoekitError as refused:
            text = f"{refused}\n"
        except Exception:
            text = traceback.format_exc()
            collector.left_out.append(f"{name}: it ended with an error, which it has")
        rows = text[:MOST_OF_A_FILE].rpartition("\n")[0].split("\n")
        parts.append(Part(name, "".join(f"{_uncut(row)}\n" for row in rows)))
    return parts


def _uncut(row: str) -> str:
    """A row without words of which messages show a part, since half a secret is none that can be known."""
    row = _CUT_WORD.sub("...", row)
    return row if len(row) < _CUT_ROW else f"{row.rpartition(' ')[0]} [...]"


def _why(run: RunDir, profile: str | None) -> list[str]:
    from moekit.runs import why
    from moekit.runs.history import read_history
    from moekit.runs.look import look_at

    seen, problems = look_at(run)
    return [*why.lines(seen, read_history(seen), profile, None), *(problem.what for problem in problems)]


def _doctor(run: RunDir, _: str | None) -> list[str]:
    from moekit.doctor import report
    from moekit.doctor.evidence import gather
    from moekit.runs.history import read_history
    from moekit.runs.look import look_at

    evidence = gather(run, read_history(look_at(run)[0]))
    return list(
        report.lines(report.Report(run.path.name, report.findings(evidence), report.looked_at(evidence)), _WIDE)
    )


def _masker(run: RunDir, parts: Sequence[Part]) -> Masker:
    """A masker that knows what this machine calls itself, whose the run is, and where it lies."""
    users, folders = set(), {str(run.path), str(run.path.resolve())}
    if run.path.parent.name == "runs":
        folders |= {str(run.path.parents[1]), str(run.path.resolve().parents[1])}
    for uid in {run.path.stat().st_uid, os.getuid()} - {0}:
        with contextlib.suppress(KeyError):
            owner = pwd.getpwuid(uid)
            users.add(owner.pw_name)
            folders |= {owner.pw_dir} if owner.pw_name not in owner.pw_dir else set()
    for part in parts:
        if part.name.startswith(("argv.", "provenance")):
            folders.update(_SHARED_ROOT.findall(part.text))
    return Masker(_secret_names(run), folders, users, [platform.node()])


def _secret_names(run: RunDir) -> tuple[str, ...]:
    """The variables that the run's recipe says are secrets."""
    from moekit.recipe.load import load_partly

    with contextlib.suppress(MoekitError, OSError, ValueError):
        return load_partly(str(run.recipe)).recipe.runtime.secrets or ()
    return ()


def _clean(name: str) -> str:
    """A path in an archive, of characters that every system takes."""
    return re.sub(r"[^\w./\[\]-]", "_", name).strip("/")
