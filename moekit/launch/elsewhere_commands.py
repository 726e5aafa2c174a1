"""`moekit launch --on docker | hf-jobs | skypilot | kubernetes`: the options of runs without Slurm, and their ways."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moekit.problems import error, print_problems
from moekit.recipe.load import Loaded

if TYPE_CHECKING:
    from moekit.cluster.profile import Cluster

ELSEWHERE = ("docker", "hf-jobs", "skypilot", "kubernetes")

_JOBS = "Hugging Face Jobs (--on hf-jobs)"
_IMAGES = "Images of a registry (--on docker, hf-jobs, skypilot, kubernetes)"

ImageOption = Annotated[
    str | None,
    typer.Option("--image", help="The image to train in.", show_default="the profile's", rich_help_panel=_IMAGES),
]
VolumeOption = Annotated[
    str | None,
    typer.Option(
        "--volume",
        help="SkyPilot's volume, or Kubernetes' claim, that is mounted at the profile's `shared_root`.",
        rich_help_panel=_IMAGES,
    ),
]
FlavorOption = Annotated[
    str | None, typer.Option("--flavor", help="The machine: h200x8 has eight H200.", rich_help_panel=_JOBS)
]
ProbeOption = Annotated[
    bool,
    typer.Option("--probe", help="No recipe: a job of 10 minutes that counts the GPUs it sees.", rich_help_panel=_JOBS),
]
TimeoutOption = Annotated[
    int | None,
    typer.Option(
        "--timeout",
        min=1,
        metavar="MINUTES",
        help="When the Hub stops the job.",
        show_default="the recipe's `runtime.time_limit_min`",
        rich_help_panel=_JOBS,
    ),
]
BucketOption = Annotated[
    str | None,
    typer.Option(
        "--bucket",
        metavar="OWNER/NAME",
        help="Where data lie, and logs and checkpoints go.",
        show_default="OWNER/moekit",
        rich_help_panel=_JOBS,
    ),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", help="Whose job it is.", show_default="your account's", rich_help_panel=_JOBS),
]
YesOption = Annotated[
    bool, typer.Option("--yes", "-y", help="Submit without asking about the price.", rich_help_panel=_JOBS)
]
DetachOption = Annotated[
    bool, typer.Option("--detach", help="Submit, and do not follow the log.", rich_help_panel=_JOBS)
]


@dataclass(frozen=True)
class Asked:
    """What the command line says that no job of Slurm reads."""

    place: str | None
    """What `--on` says."""
    recipes: Sequence[str]
    name: str | None
    profile: str | None
    dry_run: str | None
    as_json: bool
    image: str | None
    volume: str | None
    flavor: str | None
    probe: bool
    timeout_min: int | None
    bucket: str | None
    namespace: str | None
    yes: bool
    detach: bool


def launch_elsewhere(asked: Asked) -> int:
    """Launch one recipe at a place without Slurm; the exit code.

    Raises:
        MoekitError: with everything that keeps it from being launched there.
    """
    if asked.place == "hf-jobs":
        return _hf_jobs(asked)
    return _docker(asked) if asked.place == "docker" else _files(asked)


def refuse_unread(asked: Asked, of_slurm: Mapping[str, object]) -> None:
    """Refuse options that nothing at the run's place reads; `of_slurm` are given ones that jobs of Slurm alone read.

    Raises:
        MoekitError: there is one.
    """
    for option, (value, places) in _readers(asked).items():
        if value and asked.place not in places:
            where = " and ".join(f"`--on {place}`" for place in places)
            raise error(
                f"`{option}` is about {where}", "leave it out, or add one of these" if asked.place is None else ""
            )
    for option, value in of_slurm.items():
        if value and asked.place in ELSEWHERE:
            raise error(f"`{option}` is about jobs of Slurm", f"leave it out with `--on {asked.place}`")


def _readers(asked: Asked) -> dict[str, tuple[object, tuple[str, ...]]]:
    """Each option's value, and the places that read it."""
    jobs = {
        "--flavor": asked.flavor,
        "--probe": asked.probe,
        "--timeout": asked.timeout_min,
        "--bucket": asked.bucket,
        "--namespace": asked.namespace,
        "--yes": asked.yes,
        "--detach": asked.detach,
    }
    of_jobs = {option: (value, ("hf-jobs",)) for option, value in jobs.items()}
    return {
        "--image": (asked.image, ELSEWHERE),
        "--volume": (asked.volume, ("skypilot", "kubernetes")),
        **of_jobs,
    }


def _one(asked: Asked, cluster: Cluster) -> Loaded:
    """The recipe, checked for its place."""
    from moekit.launch.several import load_all

    loaded, warnings = load_all(asked.recipes, asked.name, cluster)
    print_problems(warnings)
    if len(loaded) != 1:
        raise error(f"`--on {asked.place}` takes one recipe, not {len(loaded)}", "launch them one by one")
    return loaded[0]


def _hf_jobs(asked: Asked) -> int:
    from moekit.launch import hf_jobs, hf_jobs_launch
    from moekit.runs.look import LOCAL_ROOT

    if asked.flavor is None:
        raise error("no `--flavor` says on which machine", "h200x8 has eight H200; `hf jobs hardware` lists all")
    wishes = hf_jobs_launch.Wishes(
        asked.flavor, asked.image, asked.namespace, asked.bucket, asked.timeout_min, asked.yes, asked.detach
    )
    account = asked.namespace or "NAMESPACE"
    if asked.probe:
        if asked.recipes:
            raise error("`--probe` counts GPUs and trains no recipe", "leave one of both out")
        if asked.dry_run is not None:
            print(hf_jobs_launch.dry_run(hf_jobs.probe(asked.flavor, asked.image), account))
            return 0
        return hf_jobs_launch.probe(wishes)
    cluster = hf_jobs.cluster_of(asked.flavor, asked.image or hf_jobs.IMAGE)
    loaded = _one(asked, cluster)
    if asked.dry_run is None:
        return hf_jobs_launch.launch(loaded, wishes, Path.cwd() / LOCAL_ROOT)
    request = hf_jobs_launch.requested(loaded, wishes, account)
    files = hf_jobs.job_files(loaded, loaded.name, cluster)
    if asked.as_json:
        print(json.dumps(hf_jobs_launch.as_json(request, account, files), indent=1))
        return 0
    print(hf_jobs_launch.dry_run(request, account))
    return _show(files, asked, f"nothing sent; files of {hf_jobs.runs_repository(account)}")


def _docker(asked: Asked) -> int:
    from moekit.cluster.profile import find_cluster
    from moekit.launch import docker
    from moekit.launch.elsewhere import image_of
    from moekit.launch.local import launch_local
    from moekit.launch.run_files import run_files
    from moekit.runs.look import LOCAL_ROOT

    cluster = find_cluster(asked.profile)
    root = Path(cluster.shared_root) if asked.profile else Path.cwd() / LOCAL_ROOT
    if not asked.profile:  # of the shipped one only its kind of GPU is meant
        megatron = str(root / "Megatron-LM")
        cluster = replace(
            cluster, image=None, shared_root=str(root), megatron_path=megatron, mounts=None, environment=None
        )
    loaded = _one(asked, cluster)
    image = image_of(cluster, asked.image)
    container = docker.container(loaded, loaded.name, cluster, image, root, os.environ)
    if asked.dry_run is not None:
        files = run_files(loaded, loaded.name, root)
        words = [*container.words(), "job/entry.py"]
        shown = f"{shlex.join(words)} ARGUMENTS of argv.first\n"
        return _show(
            {"docker.run": shown, **files}, asked, "nothing started; the run would lie in " + str(container.run)
        )
    found = docker.problems(loaded, cluster, root, image, os.environ)
    return launch_local(loaded, loaded.name, root, container=container, found=found)


def _files(asked: Asked) -> int:
    """Write what SkyPilot or Kubernetes takes; neither is started from here."""
    from moekit.cluster.profile import find_cluster
    from moekit.launch import elsewhere

    cluster = find_cluster(asked.profile)
    loaded = _one(asked, cluster)
    if asked.volume is None:
        what = f"no `--volume` says what holds {cluster.shared_root}, the `shared_root` of profile `{cluster.name}`"
        raise error(what, "name SkyPilot's volume (`sky volumes ls`), or Kubernetes' claim (`kubectl get pvc`)")
    if asked.dry_run is None:
        what = f"moekit does not start runs on {asked.place} itself"
        raise error(what, "`--dry-run=DIR` writes what its own tool takes, `--dry-run` prints it")
    image = elsewhere.image_of(cluster, asked.image)
    render = elsewhere.skypilot_files if asked.place == "skypilot" else elsewhere.kubernetes_files
    files = render(loaded, loaded.name, cluster, image, asked.volume)
    start = "sky launch task.yaml" if asked.place == "skypilot" else "kubectl apply -f run.yaml"
    return _show(files, asked, f"in that folder, `{start}` starts it")


def _show(files: Mapping[str, str], asked: Asked, after: str) -> int:
    """Print files, or write them into a new folder; what follows from them on standard error."""
    from moekit.launch.folders import claim, write

    if asked.dry_run:
        claim(Path(asked.dry_run), "`--dry-run=DIR` takes a folder that is not there yet")
        write(Path(asked.dry_run), files)
        after = f"{len(files)} files in {asked.dry_run}; {after}"
    elif asked.as_json:
        print(json.dumps(dict(files), indent=1))
    else:
        shown = {name: text for name, text in files.items() if not name.startswith("job/")}
        print("\n".join(f"==> {name} <==\n{text}" for name, text in shown.items()), end="")
        after += f", with {len(files) - len(shown)} more files in job/" if len(shown) < len(files) else ""
    print(after, file=sys.stderr)
    return 0
