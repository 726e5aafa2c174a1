"""What somebody asks to be checked: data sets, folders and shards, each to its report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moekit.data.checking.folder import Report, check_folder, check_pairs, removable, token_files
from moekit.data.checking.pair import Expected, Progress
from moekit.data.locking import locked
from moekit.data.manifest import prefix_of, read_manifest
from moekit.data.named import shards_of
from moekit.data.plan import DataFolder
from moekit.data.shards import bin_path, idx_path
from moekit.problems import MoekitError, error


def folder_of(given: str, shared_root: Path) -> Path | None:
    """The folder that a word of the command line means: one that is there, or a data set's; None for a shard.

    Raises:
        MoekitError: a description has problems; or there is nothing of that name.
    """
    path = Path(given)
    if path.suffix in (".yaml", ".yml"):
        from moekit.data.dataset import find_dataset

        given = find_dataset(given).name
    for folder in (path, shared_root / "data" / given):
        if given and folder.is_dir():
            return folder
    if path.suffix not in (".bin", ".idx") and not any(end(path).is_file() for end in (bin_path, idx_path)):
        shards_of(given, shared_root)  # raises, with what is there
    return None


def check_given(
    given: Sequence[str], shared_root: Path, expected: Expected, sha256: bool, progress: Progress = lambda _: None
) -> list[Report]:
    """Check what is named; shards of a folder with a plan or a manifest are checked against those.

    Raises:
        MoekitError: there is nothing of a name, or a plan or manifest cannot be read.
    """
    reports, alone = [], []
    of_folder: dict[Path, list[str]] = {}
    for word in given:
        if folder := folder_of(word, shared_root):
            reports.append(check_folder(folder, None, sha256, progress))
            continue
        prefix = Path(word).with_suffix("") if Path(word).suffix in (".bin", ".idx") else Path(word)
        there = DataFolder(prefix.parent)
        if there.plan.exists() or there.manifest.exists():
            of_folder.setdefault(prefix.parent, []).append(prefix.name)
        else:
            alone.append(prefix)
    for folder, names in of_folder.items():
        report = check_folder(folder, names, sha256, progress)
        known = {shard.prefix.name for shard in report.shards}
        alone += [folder / name for name in names if name not in known]
        reports.append(report)
    if alone:
        reports.append(check_pairs(alone, expected, sha256, progress))
    return reports


def bytes_to_read(given: Sequence[str], shared_root: Path) -> int:
    """About how many bytes of tokens a check reads, for its progress."""
    files: list[Path] = []
    for word in given:
        folder = folder_of(word, shared_root)
        if folder is None:
            prefix = Path(word).with_suffix("") if Path(word).suffix in (".bin", ".idx") else Path(word)
            files.append(bin_path(prefix))
            continue
        files += [file for file in token_files(folder) if file.suffix == ".bin"]
        try:
            blend = None if DataFolder(folder).plan.exists() else read_manifest(folder)
        except MoekitError:
            continue
        if blend and blend.parts:
            files += [bin_path(prefix_of(folder, shard)) for shard in (*blend.shards, *blend.held_out)]
    return sum(file.stat().st_size for file in files if file.is_file())


def remove_damaged(reports: Sequence[Report]) -> list[Path]:
    """Remove the damaged shards that the reports name, their records first; what was removed.

    Raises:
        MoekitError: somebody tokenizes there at this moment, or a file cannot be removed.
    """
    removed = []
    for report in reports:
        files = removable(report)
        if not files or report.folder is None or report.plan is None:
            continue
        with locked(DataFolder(report.folder), 0, report.plan.tasks):
            for file in files:
                try:
                    file.unlink(missing_ok=True)
                except OSError as problem:
                    raise error(f"cannot be removed: {problem.strerror}", "", str(file)) from None
                removed.append(file)
    return removed
