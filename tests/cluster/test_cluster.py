import ast
import inspect
import re
import subprocess
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from moekit import share
from moekit.cluster import profile as cluster
from moekit.cluster import profile_rules, profile_schema
from moekit.cluster.profile import Cluster, find_cluster, over_limits, shipped_clusters
from moekit.problems import MoekitError
from moekit.recipe import nodes
from moekit.recipe.names import variable_problem

LEAST = {
    "name": "mine",
    "gpus_per_node": "8",
    "gpu": "h200",
    "fabric": "none",
    "container": "none",
    "shared_root": "/shared",
}

PYXIS = {"container": "pyxis", "image": "/i.sqsh"}


def profile(tmp_path: Path, **changes: str | None) -> str:
    lines = [f"{key}: {value}" for key, value in {**LEAST, **changes}.items() if value is not None]
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize("name", shipped_clusters())
def test_shipped_profiles_load(name: str) -> None:
    assert find_cluster(name).name == name


def test_the_default_is_the_handbooks_cluster() -> None:
    assert find_cluster() == find_cluster("aws-p5")
    assert find_cluster().environment["NCCL_NET_PLUGIN"] == "ofi"


def test_a_profile_needs_only_what_cannot_be_guessed(tmp_path: Path) -> None:
    found = find_cluster(profile(tmp_path))
    assert (found.gpus_per_node, found.partition, found.image, found.python) == (8, None, None, "python")


REFUSED = [
    ({"shared_root": None}, ["1: `shared_root` is missing"]),
    ({"shared_root": "null"}, ["6: `shared_root` is missing"]),
    ({"shared_root": "runs"}, ["6: `shared_root` must be an absolute path, not `runs`", "all nodes must find it"]),
    ({"shared_root": "/a b"}, ["6: `shared_root` has a ` `, which no mount carries: `/a b`",
                               "give it a path without spaces, commas and colons"]),
    ({"python": "python3 -X dev"}, ["7: `python` is `python3 -X dev`: one program, without arguments",
                                    "what it needs before it starts belongs in `setup_script`"]),
    ({"gpu": "h1000"}, ["3: `gpu` must be one of a100, h100, h200, b200, gb200, b300, gb300, not `h1000`",
                        "did you mean `h100`?"]),
    ({"gpus_per_node": "0"}, ["2: `gpus_per_node` must be at least 1, not 0"]),
    ({"gres": "gpu:h100:8"}, ["7: `gres` is `gpu:h100:8`",
                              "write `gpu` or, with Slurm's type, `gpu:h100`; the number is `gpus_per_node`"]),
    ({"partitio": "gpu"}, ["7: unknown field `partitio`", "did you mean `partition`?"]),
    ({"partition": '"gpu debug"'}, ["7: `partition` is `gpu debug`, which no #SBATCH line carries",
                                    "write the name as Slurm prints it, without spaces"]),
    ({"cpu_partition": '"a;b"'}, ["7: `cpu_partition` is `a;b`, which no #SBATCH line carries",
                                  "write the name as Slurm prints it, without spaces"]),
    ({"container": "pyxis"}, ["5: `image` is missing, which `container: pyxis` starts",
                              "`moekit image import` makes one (handbook 2.2)"]),
    ({**PYXIS, "image": "./i.sqsh"}, ["7: `image` must be an absolute path, not `./i.sqsh`", "all nodes must find it"]),
    ({"image": "/i.sqsh"}, ["7: `image` does nothing with `container: none`",
                            "write `container: pyxis`, or take it out"]),
    ({**PYXIS, "setup_script": "/s.sh"}, ["8: `setup_script` does nothing with `container: pyxis`",
                                          "the image is all there is: build it in, or write `container: none`"]),
    ({"setup_script": "env.sh"}, ["7: `setup_script` must be an absolute path, not `env.sh`",
                                  "all nodes must find it"]),
    ({**PYXIS, "mounts": "['/my dir:/d']"}, ["8: mount `/my dir:/d` has a space or a comma, which pyxis splits at",
                                             "give the folder a name without them"]),
    ({**PYXIS, "mounts": "['/a,b:/c']"}, ["8: mount `/a,b:/c` has a space or a comma, which pyxis splits at",
                                          "give the folder a name without them"]),
    ({**PYXIS, "mounts": "['data:/data']"}, ["8: mount `data:/data` must be `/path` or `/path:/inside`, both absolute",
                                             "flags may follow the second: `/path:/inside:ro`"]),
    ({**PYXIS, "mounts": "['/a:/c', '/b:/c']"}, ["8: two mounts lie at `/c`", "leave one"]),
    ({**PYXIS, "mounts": "['/c', '/b:/c:ro']"}, ["8: two mounts lie at `/c`", "leave one"]),
    ({**PYXIS, "mounts": "['/x:/shared']"}, ["8: a mount lies at `/shared`, where `shared_root` is mounted anyway",
                                             "leave it out"]),
    ({"library_path": "[lib]"}, ["7: `library_path` has `lib`; it lists absolute folders",
                                 "one folder an entry, as the container sees it"]),
    ({"time_limit_min": "240", "max_time_min": "60"},
     ["7: `time_limit_min` is 240, more than `max_time_min`, which is 60",
      "`max_time_min` comes from {path}:8"]),
    ({"nodes": "4", "max_nodes": "8"}, ["8: `max_nodes` is 8, more than `nodes`, which is 4",
                                        "`nodes` comes from {path}:7"]),
    ({"environment": "{LD_LIBRARY_PATH: /x}"},
     ["7: `environment.LD_LIBRARY_PATH` would take the image's own folders away",
      "list folders in the profile's `library_path`"]),
    ({"environment": "{PATH: /x}"}, ["7: `environment.PATH` is the job's shell's own",
                                     "the profile's `python` names an interpreter"]),
    ({"environment": "{MOEKIT_DEVICE: cpu}"}, ["7: `environment.MOEKIT_DEVICE` is moekit's own"]),
    ({"environment": "{SLURM_JOB_ID: 1}"}, ["7: `environment.SLURM_JOB_ID` is Slurm's own"]),
    ({**PYXIS, "environment": "{ENROOT_DATA_PATH: /nvme}"},
     ["8: `environment.ENROOT_DATA_PATH` never reaches enroot: pyxis drops a job's `ENROOT_` variables",
      "only the nodes' enroot.conf sets it: ask who runs the cluster"]),
    ({"fabric": "efa", "environment": "{NCCL_NET_PLUGIN: spcx}"},
     ["7: `environment.NCCL_NET_PLUGIN` is `spcx`, the plugin of another network: NCCL would fall back to sockets on"
      " EFA",
      "on EFA it is `ofi` (handbook 2.2)"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_what_is_refused(tmp_path: Path, changes: dict[str, str | None], said: list[str]) -> None:
    path = profile(tmp_path, **changes)
    with pytest.raises(MoekitError) as refused:
        find_cluster(path)
    assert str(refused.value) == f"{path}:" + "\n    hint: ".join(said).replace("{path}", path)


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    wrong = {"gpu": "h1000", "partition": '"a b"', "shared_root": "runs", "nodes": "many", "image": "/i", "nmae": "x"}
    with pytest.raises(MoekitError) as refused:
        find_cluster(profile(tmp_path, **wrong, container="pyxes"))
    lines = [int(problem.where.rpartition(":")[2]) for problem in refused.value.problems]
    assert lines == [3, 5, 6, 7, 8, 10]  # not of image: which container it is for could not be read


def test_every_rule_is_seen_to_refuse(tmp_path: Path, unreached: Callable[..., list[str]]) -> None:
    def refuse_all() -> None:
        for changes, _ in REFUSED:
            with pytest.raises(MoekitError):
                find_cluster(profile(tmp_path, **changes))

    assert unreached([Path(profile_rules.__file__)], {"Problem"}, refuse_all) == []


def test_mounts_that_pyxis_takes(tmp_path: Path) -> None:
    mounts = ("/lustre/lustre", "/a:/b", "/a:/c:ro", "/d:/e:ro+rprivate")
    assert find_cluster(profile(tmp_path, **PYXIS, mounts=str([*mounts]))).mounts == mounts


def test_an_image_may_be_a_registrys(tmp_path: Path) -> None:
    image = "nvcr.io#nvidia/pytorch:26.06-py3"
    assert find_cluster(profile(tmp_path, container="pyxis", image=image)).image == image


def test_limits_are_the_sites(tmp_path: Path) -> None:
    found = find_cluster(profile(tmp_path, nodes="8", max_nodes="4", max_time_min="60", max_array_tasks="1000"))
    assert list(over_limits(found, nodes=4, time_min=60, array_tasks=1000)) == []
    assert list(over_limits(found, nodes=9, time_min=61)) == [
        ("9 nodes are more than the 4 of profile `mine`", "`max_nodes` there says so"),
        ("61 minutes are more than the 60 of profile `mine`", "`max_time_min` there says so"),
    ]
    assert list(over_limits(find_cluster(profile(tmp_path)), nodes=10_000, time_min=10**6, array_tasks=10**6)) == []


def test_an_unknown_profile_names_the_closest() -> None:
    with pytest.raises(MoekitError) as refused:
        find_cluster("aws-p4")
    assert str(refused.value) == "error: there is no cluster profile `aws-p4`\n    hint: did you mean `aws-p5`?"
    with pytest.raises(MoekitError, match="`moekit init` writes one for the cluster you are on"):
        find_cluster("our-own")


def test_each_field_is_documented() -> None:
    body = ast.parse(inspect.getsource(Cluster)).body[0].body
    documented = [
        one.target.id for one, after in pairwise(body) if isinstance(one, ast.AnnAssign) and isinstance(after, ast.Expr)
    ]
    assert documented == [field.name for field in fields(Cluster)]


def test_every_variable_that_bash_keeps_for_itself_is_refused() -> None:
    """What does not arrive in a child when a shell exports it."""
    known = subprocess.run(["bash", "-c", "compgen -v"], capture_output=True, text=True, env={}).stdout.split()
    assert "SHELLOPTS" in known
    lost = []
    for name in {*known, "EPOCHREALTIME", "SRANDOM", "BASH_ENV", "FUNCNAME", "COMP_WORDBREAKS"}:
        script = f"export {name}=moekit; exec /usr/bin/env"
        seen = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env={}).stdout
        if f"{name}=moekit\n" not in seen:
            lost.append(name)
    assert len(lost) > 10
    assert [name for name in lost if not variable_problem(name)] == []


def test_plain_variables_are_taken() -> None:
    for name in ("NCCL_DEBUG", "c_lower", "HOME", "argv", "id", "LD_PRELOAD", "PYTHONPATH", cluster.DEFAULT.upper()):
        assert variable_problem(name) is None


def test_a_name_no_file_can_have_is_refused() -> None:
    with pytest.raises(MoekitError, match="cannot be read: file name too long"):
        find_cluster("x" * 300)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# nothing\n", "p.yaml:1: is empty\n    hint: `moekit init` writes a profile of the cluster you are on"),
        ("a: {b: {c: {d: {e: {f: {g: {h: {i: 1}}}}}}}}",
         "p.yaml:1: is nested more than 8 deep\n    hint: a profile is one, but for `environment`"),
        ("name: &a b", "p.yaml:1: uses a YAML anchor or alias (`&a`)"
         "\n    hint: write the values out: a profile inherits from none"),
    ],
)  # fmt: skip
def test_what_is_no_plain_yaml(text: str, said: str) -> None:
    with pytest.raises(MoekitError) as refused:
        cluster.parse_cluster(text, "p.yaml")
    assert str(refused.value) == said


def test_no_profile_is_told_about_recipes() -> None:
    """Every hint of the reader that speaks of recipes has a profile's words."""
    said = re.findall(
        r'"([^"\n]*(?:recipe|`base:`)[^"\n]*)"', Path(nodes.__file__).read_text().partition("def read(")[2]
    )
    assert set(said) - set(cluster.HINTS) == {"a recipe is a page of YAML: is this the right file?"}
    assert set(cluster.HINTS) <= set(said)


# The schema, the shipped profiles, the page


SHIPPED = share.folder("slurm") / "clusters"


def test_the_schema_beside_the_profiles_is_the_codes() -> None:
    wanted = "moekit schema profile > slurm/clusters/schema.json"
    assert (SHIPPED / "schema.json").read_text() == profile_schema.schema_text(), wanted
    jsonschema.Draft7Validator.check_schema(profile_schema.schema())


@pytest.mark.parametrize("name", shipped_clusters())
def test_editors_take_the_shipped_profiles(name: str) -> None:
    text = (SHIPPED / f"{name}.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    jsonschema.Draft7Validator(profile_schema.schema()).validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpuz": "h100"}, "'gpuz' was unexpected"),
        ({"gpus_per_node": 0}, "less than the minimum"),
        ({"fabric": "ethernet"}, "is not one of"),
        ({"gpu": None}, "is not one of"),
        ({"environment": {"A": [1]}}, "is not of type"),
        ({"shared_root": None}, "is not of type"),
    ],
)
def test_editors_underline_slips(changes: dict[str, Any], said: str) -> None:
    good = yaml.safe_load("\n".join(f"{key}: {value}" for key, value in LEAST.items()))
    errors = list(jsonschema.Draft7Validator(profile_schema.schema()).iter_errors({**good, **changes}))
    assert said in " ".join(error.message for error in errors)


@pytest.mark.parametrize("name", shipped_clusters())
def test_each_variable_of_a_shipped_profile_has_its_source(name: str) -> None:
    found = find_cluster(name).environment or {}
    block = (SHIPPED / f"{name}.yaml").read_text().partition("\nenvironment:")[2]
    sourced = re.findall(r"^  (\w+): .* # .*(?:\(\d\.\d.*\)|NCCL's user guide|Megatron's|NVL72)", block, re.MULTILINE)
    assert sourced == list(found)


@pytest.mark.parametrize("name", shipped_clusters())
def test_a_shipped_profile_shows_what_a_site_has_to_say(name: str) -> None:
    text = (SHIPPED / f"{name}.yaml").read_text()
    said = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    unsaid = {field.name for field in fields(Cluster)} - said
    assert unsaid <= {
        "gres",
        "mounts",
        "setup_script",
        "python",
        "cuda",
        "library_path",
        "nccl_tests",
        "nccl_tests_image",
        "preflight",
    }


def test_the_page_has_every_field() -> None:
    page = (share.PACKAGE.parent / "docs/clusters.md").read_text()
    assert page.endswith(f"## Fields\n\n{profile_schema.reference()}"), "moekit schema profile --markdown"
