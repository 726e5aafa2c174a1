"""`moekit data tokenize --on slurm` and `moekit data status`: plan, submission and what is said of both."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from moekit.cluster.profile import Cluster
from moekit.data.array import status as array_status
from moekit.data.array.jobs import submitted
from moekit.data.array.submit import Sent, refuse_while_running, submit
from moekit.data.array.texts import DEFAULT_ARRAY_TASKS, array_files, arrays
from moekit.data.dataset import Dataset, find_dataset
from moekit.data.locking import locked
from moekit.data.making.shards import find_shard
from moekit.data.places import load_plan
from moekit.data.plan import DataFolder, Plan
from moekit.data.planning import folder_of, make_plan, settle_plan
from moekit.launch.folders import claim, write
from moekit.problems import error, print_problems
from moekit.runs.report import with_profile


def tokenize_on_slurm(given: str, cluster: Cluster, root: Path, profile: str | None, as_json: bool) -> int:
    """Put a data set's plan down and submit the shards that are missing; the exit code.

    Raises:
        MoekitError: as `make_plan`, `settle_plan` and `submit`; then nothing is submitted.
    """
    dataset = find_dataset(given)
    folder = folder_of(root, dataset.name)
    array_files(dataset, folder, arrays([0], 1)[0], cluster, sys.executable)  # what does not fit is told at once
    refuse_while_running(folder)
    plan = make_plan(dataset, root)
    with locked(folder, 0, plan.tasks):
        settle_plan(folder, plan)
    missing = [task for task in range(plan.tasks) if not find_shard(folder, plan, task)]
    sent, problems = submit(dataset, folder, missing, cluster, sys.executable) if missing else ([], [])
    if as_json:
        facts = {"name": plan.name, "folder": str(folder.path), "shards": plan.tasks, "missing": missing}
        print(json.dumps({**facts, "jobs": [one.as_json() for one in sent]}, indent=1))
    else:
        print("\n".join(_said(given, folder, plan, sent, profile)))
    print_problems(problems)
    return 1 if problems else 0


def _said(given: str, folder: DataFolder, plan: Plan, sent: Sequence[Sent], profile: str | None) -> list[str]:
    if not sent:
        many = "its shard is" if plan.tasks == 1 else f"all {plan.tasks} shards are"
        next_one = f"  next        moekit data manifest {plan.name}{with_profile(profile)}"
        return [f"{plan.name}: {many} whole", f"  directory   {folder.path}", next_one]
    said = []
    for one in sent:
        count = len(one.array.tasks)
        which = f"{count} of {plan.tasks} shards" if count > 1 else f"shard {one.array.tasks[0]} of {plan.tasks}"
        said += [f"{plan.name}: job {one.job} makes {which}", f"  directory   {one.folder}"]
    said.append(f"  python      {sys.executable}, which every node must see")
    return [*said, f"  next        moekit data status {given}{with_profile(profile)}"]


def dry_run(given: str, cluster: Cluster, root: Path, into: str, as_json: bool) -> None:
    """Print the texts of the submission, or write them into the folder `into`; nobody is asked for anything.

    Raises:
        MoekitError: the description or the profile is wrong, or the folder is there.
    """
    dataset = find_dataset(given)
    folder = folder_of(root, dataset.name)
    texts = _texts(dataset, folder, cluster)
    if into:
        claim(Path(into), "`--dry-run=DIR` takes a folder that is not there yet")
        write(Path(into), texts)
        print(f"{len(texts)} files in {into}; nothing submitted", file=sys.stderr)
    elif as_json:
        print(json.dumps(texts, indent=1))
    else:
        print("\n".join(f"==> {name} <==\n{text}" for name, text in texts.items()), end="")
        print(f"nothing written; the data set would lie in {folder.path}", file=sys.stderr)


def _texts(dataset: Dataset, folder: DataFolder, cluster: Cluster) -> dict[str, str]:
    """The files of each array, in a folder of its own where there are several."""
    plan = load_plan(folder)
    missing = [task for task in range(dataset.tasks) if plan is None or not find_shard(folder, plan, task)]
    made = arrays(missing, cluster.max_array_tasks or DEFAULT_ARRAY_TASKS)
    texts: dict[str, str] = {}
    for number, array in enumerate(made, 1):
        files: Mapping[str, str] = array_files(dataset, folder, array, cluster, sys.executable)
        texts |= {name if len(made) == 1 else f"{number}/{name}": text for name, text in files.items()}
    return texts


def status(given: str, root: Path, profile: str | None, as_json: bool) -> None:
    """Say what has become of each shard of a data set, given by its description or its name.

    Raises:
        MoekitError: there is no plan of it, or Slurm does not answer.
    """
    folder = DataFolder(root / "data" / given)
    if "/" in given or not folder.plan.is_file():
        folder = folder_of(root, find_dataset(given).name)
    plan = load_plan(folder)
    if plan is None:
        raise error("nothing was tokenized here", f"`moekit data tokenize {given}` does it", str(folder.path))
    made = submitted(folder)
    shards = array_status.shards(folder, plan, made)
    left = [shard for shard in shards if shard.word != "whole"]
    on_slurm = " --on slurm" if made else ""
    following = f"moekit data tokenize {given}{on_slurm}" if left else f"moekit data manifest {plan.name}"
    if left and any(one.live for one in made):
        following = ""
    if as_json:
        facts = {"name": plan.name, "folder": str(folder.path), "next": following or None}
        print(json.dumps({**facts, "shards": [shard.as_json() for shard in shards]}, indent=1))
        return
    print(f"{plan.name}: {array_status.counted(shards)}")
    print(*array_status.table(shards), sep="\n", end="\n" if left else "")
    for path in dict.fromkeys(shard.log.parent for shard in left if shard.log):
        print(f"  logs        {path}")
    print(f"  directory   {folder.path}")
    if following:
        print(f"  next        {following}{with_profile(profile)}")
