import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moekit import share
from moekit.cluster.profile import find_cluster, shipped_clusters
from moekit.launch.run_files import run_files
from moekit.launch.script import (
    environment,
    environment_script,
    job_script,
    nodes_and_gpus,
    slurm_files,
    srun_words,
    torchrun_words,
)
from moekit.problems import MoekitError
from moekit.recipe.load import Loaded, load

Changed = Callable[..., Loaded]
AWS = find_cluster("aws-p5")
SCRIPTS = ("job.sbatch", "environment.sh", "argv.srun", "argv.torchrun")
COPIED = ("train.sh", "preflight.sh")
ROOT_RECIPES = sorted(share.folder("recipes").glob("*.yaml"))


def rendered(texts: dict[str, str]) -> dict[str, str]:
    """What differs from run to run: all but the files copied as they are."""
    return {name: text for name, text in texts.items() if name not in COPIED and not name.startswith("job/")}


@pytest.mark.parametrize("path", ROOT_RECIPES, ids=lambda path: path.stem)
def test_golden_run_directories(path: Path, golden: Callable[[str, dict[str, str]], None]) -> None:
    loaded = load(path.stem)
    local = loaded.recipe.runtime.device == "cpu"
    texts = run_files(loaded, path.stem, "/home/me") if local else slurm_files(loaded, path.stem, AWS)
    golden(path.stem, rendered(texts))


@pytest.mark.parametrize("profile", shipped_clusters())
def test_golden_scripts_of_two_nodes(
    profile: str, recipe_of: Changed, golden: Callable[[str, dict[str, str]], None]
) -> None:
    cluster = find_cluster(profile)
    loaded = recipe_of(f"parallel: {{gpus: {2 * cluster.gpus_per_node}}}")
    texts = slurm_files(loaded, "two_nodes", cluster)
    golden(f"clusters/{profile}", {name: texts[name] for name in SCRIPTS})


def test_copied_files_are_the_originals() -> None:
    texts = slurm_files(load("dense"), "dense", AWS)
    copied = {name: text for name, text in texts.items() if name not in rendered(texts)}
    folder = Path(share.PACKAGE, "job")
    for name in COPIED:
        assert copied.pop(name) == (share.folder("slurm") / name).read_text()
    programs = [path for path in folder.glob("*.py") if path.stem != "__init__"]
    programs += (folder / "preflight").glob("*.py")
    assert copied == {f"job/{path.relative_to(folder)}": path.read_text() for path in programs}


@pytest.mark.parametrize(("gpus", "layout"), [(1, (1, 1)), (4, (1, 4)), (8, (1, 8)), (16, (2, 8)), (64, (8, 8))])
def test_nodes(recipe_of: Changed, gpus: int, layout: tuple[int, int]) -> None:
    recipe = recipe_of(f"parallel: {{gpus: {gpus}}}").recipe
    assert nodes_and_gpus(recipe, AWS) == layout
    nodes, each = layout
    header = job_script(recipe, AWS, "x").splitlines()
    assert f"#SBATCH --nodes={nodes}" in header
    assert f"#SBATCH --gres=gpu:{each}" in header
    assert f"--nodes={nodes}" in srun_words(recipe, AWS)
    assert torchrun_words(recipe, AWS)[3:5] == [f"--nnodes={nodes}", f"--nproc-per-node={each}"]


def test_gpus_that_fill_no_node(recipe_of: Changed) -> None:
    loaded = recipe_of("parallel:\n  gpus: 12")
    with pytest.raises(MoekitError) as refused:
        slurm_files(loaded, "x", AWS)
    assert str(refused.value) == (
        f"{loaded.source.shown}:3: 12 GPUs are no whole number of nodes with 8 GPUs each (profile `aws-p5`)"
        "\n    hint: `parallel.gpus` can be 8 or 16"
    )


def test_the_header_says_only_what_is_set(recipe_of: Changed) -> None:
    recipe = recipe_of("runtime: {time_limit_min: null}").recipe
    bare = job_script(recipe, replace(AWS, time_limit_min=None, cpus_per_task=None), "x")
    for option in ("partition", "account", "qos", "time", "cpus-per-task", "signal", "container", "chdir"):
        assert f"--{option}" not in bare
    full = job_script(recipe, replace(AWS, partition="gpu", account="me", qos="high"), "x")
    for line in ("--partition=gpu", "--account=me", "--qos=high", "--time=120", "--no-requeue", "--open-mode=append"):
        assert f"#SBATCH {line}\n" in full


def test_the_recipes_time_limit_wins(recipe_of: Changed) -> None:
    assert "#SBATCH --time=30\n" in job_script(recipe_of("runtime: {time_limit_min: 30}").recipe, AWS, "x")


def test_a_run_that_ends_on_sigterm_gets_it_in_time(recipe_of: Changed) -> None:
    recipe = recipe_of("resilience: {exit_signal_handler: true}").recipe
    assert "#SBATCH --signal=TERM@300\n" in job_script(recipe, AWS, "x")
    assert environment(recipe, AWS)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "300"


def test_another_exit_signal_is_sent_and_handed_on(recipe_of: Changed) -> None:
    recipe = recipe_of("resilience: {exit_signal_handler: true, exit_signal: SIGUSR1}").recipe
    assert "#SBATCH --signal=USR1@300\n" in job_script(recipe, AWS, "x")
    assert torchrun_words(recipe, AWS)[-1] == "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    assert "--signals" not in "".join(torchrun_words(recipe_of("").recipe, AWS))


def test_on_processors_it_asks_for_no_gpu(recipe_of: Changed) -> None:
    recipe = recipe_of("parallel: {gpus: 4}", base="quickstart").recipe
    cluster = replace(AWS, partition="gpu", cpu_partition="cpu", gpus_per_node=2, cpus_per_task=32)
    script = job_script(recipe, cluster, "x")
    assert "--gres" not in script
    assert "#SBATCH --partition=cpu\n#SBATCH --nodes=2\n" in script
    assert "#SBATCH --partition=gpu\n" in job_script(recipe, replace(cluster, cpu_partition=None), "x")
    said = environment(recipe, cluster)
    assert (said["MOEKIT_DEVICE"], said["CUDA_VISIBLE_DEVICES"], said["OMP_NUM_THREADS"]) == ("cpu", "", "16")


def test_a_gpu_of_several_types() -> None:
    assert "#SBATCH --gres=gpu:h100:8\n" in job_script(load("first_moe").recipe, replace(AWS, gres="gpu:h100"), "x")


def test_a_thousand_nodes(recipe_of: Changed) -> None:
    texts = slurm_files(recipe_of("parallel: {gpus: 8192}"), "x", AWS)
    assert "#SBATCH --nodes=1024\n" in texts["job.sbatch"]
    assert "--nnodes=1024\n" in texts["argv.torchrun"]
    assert max(len(text) for name, text in texts.items() if name in SCRIPTS) < 2000


def test_the_profiles_limits(recipe_of: Changed) -> None:
    loaded = recipe_of("parallel: {gpus: 24}\nruntime:\n  time_limit_min: 90")
    with pytest.raises(MoekitError) as refused:
        slurm_files(loaded, "x", replace(AWS, max_nodes=2, max_time_min=60))
    assert [(problem.where, problem.what) for problem in refused.value.problems] == [
        (f"{loaded.source.shown}:2", "3 nodes are more than the 2 of profile `aws-p5`"),
        (f"{loaded.source.shown}:4", "90 minutes are more than the 60 of profile `aws-p5`"),
    ]


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("profile: {ranks: [0]}", "0"),
        ("profile: {ranks: [17, 1, 16, 0]}", "0,2"),
        ("profile: {ranks: null}", "0,1,2"),
        ("profile: {use_pytorch_profiler: true}", None),
        ("profile: {enabled: null}", None),
    ],
)
def test_the_nodes_where_nsight_records(recipe_of: Changed, text: str, nodes: str | None) -> None:
    loaded = recipe_of(f"{text}\nparallel: {{gpus: 24}}", base="settings/profile_nsys")
    assert environment(loaded.recipe, AWS)["MOEKIT_PROFILED_NODES"] == nodes
    assert ("argv.nsys" in slurm_files(loaded, "x", AWS)) == (nodes is not None)


def test_the_stack_picks_the_script(recipe_of: Changed) -> None:
    hybrid = recipe_of('model: {stack: hybrid, num_layers: 2, hybrid_layer_pattern: "*E"}').recipe
    assert environment(hybrid, AWS)["MOEKIT_STACK"] == "hybrid"
    assert "MOEKIT_STACK" not in environment(recipe_of("model: {stack: gpt}").recipe, AWS)


def test_one_task_a_node_with_all_its_cpus() -> None:
    recipe = load("first_moe").recipe
    for text in (job_script(recipe, AWS, "x").splitlines(), [f"#SBATCH {word}" for word in srun_words(recipe, AWS)]):
        assert {"#SBATCH --ntasks-per-node=1", "#SBATCH --cpus-per-task=96"} <= set(text)


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("text", "gpu", "value"),
    [
        ("", "h100", None),
        ("parallel: {tensor_model: 2, sequence: true}", "h100", "1"),
        ("parallel: {context: 2}", "h200", "1"),
        ("parallel: {context: 2}", "b200", None),
        ("parallel: {context: 2, use_megatron_fsdp: true}", "h100", None),
        ("parallel: {context: 2}\nmegatron: {extra: [--use-torch-fsdp2]}", "h100", None),
        ("parallel: {context: 2}\noverlap: {moe_expert_parallel_comm: true}", "h100", None),
        ("parallel: {context: 2}\nruntime: {environment: {CUDA_DEVICE_MAX_CONNECTIONS: 8}}", "h100", "8"),
        ("runtime: {environment: {CUDA_DEVICE_MAX_CONNECTIONS: 32}}", "h100", "32"),
        ("parallel: {context: 2}\nruntime: {environment: {CUDA_DEVICE_MAX_CONNECTIONS: null}}", "h100", None),
    ],
)
def test_cuda_device_max_connections(recipe_of: Changed, text: str, gpu: str, value: str | None) -> None:
    recipe, cluster = recipe_of(text).recipe, replace(AWS, gpu=gpu)
    assert environment(recipe, cluster).get(CONNECTIONS) == value
    winning = next(word for word in srun_words(recipe, cluster) if word.startswith("--container-env="))
    assert (CONNECTIONS in winning.partition("=")[2].split(",")) == (value is not None)


def test_sharded_weights_never_get_one_connection(recipe_of: Changed) -> None:
    """Whatever the submitting shell has."""
    for text in ("parallel: {use_megatron_fsdp: true}", "megatron: {extra: [--use-torch-fsdp2]}"):
        said = environment_script(environment(recipe_of(text).recipe, AWS), ())
        assert f"unset -v {CONNECTIONS}\n" in said


def test_what_wins_over_the_image(recipe_of: Changed) -> None:
    text = "runtime: {environment: {NCCL_DEBUG: null, c_lower: 1, FI_PROVIDER: tcp}, secrets: [HF_TOKEN]}"
    recipe = recipe_of(text, base="dense").recipe
    words = srun_words(recipe, replace(AWS, megatron_path=None, library_path=None))
    assert words[-1] == (
        "--container-env=MOEKIT_DEVICE,NCCL_NET_PLUGIN,FI_PROVIDER,FI_EFA_USE_DEVICE_RDMA,NCCL_SOCKET_IFNAME,"
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO,c_lower,HF_TOKEN"
    )
    script = environment_script(environment(recipe, AWS), ("HF_TOKEN",))
    assert "unset -v NCCL_DEBUG\n" in script
    assert "export FI_PROVIDER=tcp\n" in script


def test_mounts(recipe_of: Changed) -> None:
    cluster = replace(AWS, shared_root="/fsx/me", megatron_path="/opt/Megatron-LM", mounts=("/nvme", "/a:/b:ro"))
    assert "--container-mounts=/fsx/me:/fsx/me,/opt/Megatron-LM:/opt/Megatron-LM,/nvme:/nvme,/a:/b:ro" in srun_words(
        recipe_of().recipe, cluster
    )
    inside = replace(cluster, megatron_path="/fsx/me/Megatron-LM", mounts=None)
    assert "--container-mounts=/fsx/me:/fsx/me" in srun_words(recipe_of().recipe, inside)


def test_no_container(recipe_of: Changed) -> None:
    words = srun_words(recipe_of().recipe, replace(AWS, container="none", image=None))
    assert words == [
        *["--nodes=1", "--ntasks-per-node=1", "--export=ALL", "--kill-on-bad-exit=0", "--wait=60"],
        "--cpus-per-task=96",
    ]


HOSTILE = {
    "SPACES": "  x  y\t ",
    "QUOTES": """it's "quoted" '' \\' """,
    "DOLLAR": "$HOME ${HOME} $(touch /tmp/p) `id`",
    "COMMAND": "a; touch p & b | c > d < e",
    "BACKSLASH": "\\n\\\\ \\",
    "STARS": "* ? [a-z] ~ {a,b} !x #y %z",
    "EMPTY": "",
    "UNICODE": "é 日本 \U0001f600",
    "EQUALS": "a=b=c",
    "c_lower": "1",
    "argv": "not the script's",
    "id": "0",
    "DASH": "-n -e --",
}


def test_every_value_arrives_byte_for_byte(tmp_path: Path) -> None:
    script = environment_script({**HOSTILE, "GONE": None}, ())
    (tmp_path / "environment.sh").write_text(script)
    command = "set -euo pipefail; source ./environment.sh; exec env -0"
    given = {"GONE": "x", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, cwd=tmp_path, env=given, check=True)
    seen = dict(entry.split("=", 1) for entry in done.stdout.decode().split("\0") if entry)
    assert {name: seen.get(name) for name in HOSTILE} == HOSTILE
    assert "GONE" not in seen
    assert [path.name for path in tmp_path.iterdir()] == ["environment.sh"]


def test_a_secret_is_asked_for_by_name(tmp_path: Path) -> None:
    (tmp_path / "environment.sh").write_text(environment_script({}, ("HF_TOKEN",)))
    command = ["bash", "-c", "source ./environment.sh; echo reached"]
    without = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"PATH": "/bin"})
    assert (without.returncode, without.stdout) == (127, "")
    assert "HF_TOKEN: is a secret of this run: set it in the shell that submits" in without.stderr
    given = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"HF_TOKEN": "$x"})
    assert given.stdout == "reached\n"


def test_the_name_is_one_word_of_the_header() -> None:
    with pytest.raises(MoekitError, match="a run cannot be named"):
        slurm_files(load("dense"), "x\n#SBATCH --nodes=9", AWS)
    assert "#SBATCH --job-name=a.b-c_1\n" in slurm_files(load("dense"), "a.b-c_1", AWS)["job.sbatch"]


def test_shellcheck(tmp_path: Path) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    texts = slurm_files(load("first_moe"), "x", AWS)
    for name in ("train.sh", "job.sbatch", "environment.sh"):
        (tmp_path / name).write_text(texts[name])
    found = [subprocess.run(["shellcheck", "-s", "bash", name], cwd=tmp_path, capture_output=True, text=True).stdout
             for name in ("train.sh", "job.sbatch", "environment.sh")]  # fmt: skip
    assert "".join(found) == ""


def test_no_two_places_say_one_option() -> None:
    """A fact stands once in the header and once in a step."""
    texts = slurm_files(load("first_moe"), "x", AWS)
    for name in ("job.sbatch", "argv.srun", "argv.torchrun"):
        options = re.findall(r"^(?:#SBATCH )?(--[a-z-]+)", texts[name], re.MULTILINE)
        assert len(options) == len(set(options))
