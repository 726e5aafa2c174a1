"""Texts that mean something to a shell, in every field that takes one: they arrive as they are, or are refused by name.

`tests/slurm/test_job.py` sends them through a real job.
"""

import dataclasses
import json
import re
import shlex
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moekit.cluster.profile import Cluster, find_cluster
from moekit.launch.script import slurm_files
from moekit.problems import MoekitError
from moekit.recipe.check_command import checked
from moekit.recipe.load import load
from moekit.recipe.schema import Recipe
from moekit.recipe.schema.section import Section

HOSTILE = ["it's\"$(touch${IFS}p)`p`;é", "a $HOME b ", "a\nb", "-zq"]
HEADER = re.compile(
    r"#SBATCH --[a-z-]+(=[A-Za-z0-9._,@%+:-]+)?|#!/bin/bash|# Run changed, by moekit .*|exec bash train.sh"
)
PROFILE = {"name": "p", "gpus_per_node": 8, "gpu": "h100", "fabric": "efa", "shared_root": "/shared"}
READ_WITH_PYXIS = ("image", "mounts", "nccl_tests_image")
NOT_THE_JOBS = ("name", "cpu_partition", "transformer_engine", "cuda", "torch", "nccl_tests", "nccl_tests_image")
"""Fields of a profile for people, for checks, or for another job."""


def texts_of(kind: type) -> Iterator[tuple[str, str]]:
    """The fields that take any text, and how one such value is written in YAML."""
    for name, hint in typing.get_type_hints(kind).items():
        options = [hint, *typing.get_args(hint)]
        written = {str: "%s", tuple[str, ...]: "[%s]"}
        for option in options:
            if isinstance(option, type) and issubclass(option, Section):
                yield from ((f"{name}.{inner}", text) for inner, text in texts_of(option))
            elif isinstance(option, type) and dataclasses.is_dataclass(option):  # a layout of layers
                yield name, "%s"
            elif option in written:
                yield name, written[option]
            elif "Mapping[str, str" in str(option):
                yield name, "{A_NAME: %s}"


def arrives(texts: dict[str, str], value: str) -> bool:
    """Whether a value is within a word of a command line or of the header, or is a variable's."""
    named = ("argv.", "job.sbatch")
    words = [line for name, text in texts.items() if name.startswith(named) for line in text.splitlines()]
    variables = [shlex.split(line)[-1] for line in texts["environment.sh"].splitlines()]
    return any(value in word for word in [*words, *variables])


def quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def answer(render: Callable[[], dict[str, str]]) -> tuple[dict[str, str], str]:
    """The files that are rendered, or why they are not."""
    try:
        return render(), ""
    except MoekitError as refused:
        return {}, str(refused)


def held(texts: dict[str, str]) -> None:
    """Nothing of a value is in the header, and every file keeps its lines."""
    assert [line for line in texts["job.sbatch"].splitlines() if not HEADER.fullmatch(line)] == []
    assert not Path("p").exists()


AWS = find_cluster("aws-p5")
RECIPE_TEXTS = [field for field in texts_of(Recipe) if field[0] not in ("base", "runtime.secrets")]


@pytest.mark.parametrize(("name", "written"), RECIPE_TEXTS, ids=lambda text: text if "." in text else "")
def test_a_recipes_field(tmp_path: Path, name: str, written: str) -> None:
    section, _, field = name.rpartition(".")
    source = tmp_path / "changed.yaml"
    for value in HOSTILE:
        line = f"{field}: {written % quoted(value)}"
        source.write_text(f"base: dense\n{section}: {{{line}}}\n" if section else f"base: dense\n{line}\n")
        texts, refusal = answer(lambda: slurm_files(checked(str(source), AWS), "changed", AWS))
        if refusal:
            assert field in refusal, (value, refusal)
            continue
        held(texts)
        # a summary is shown to people only; where data lie and a run begins from is a part of a path
        assert name in ("summary", "monitor.control_run") or arrives(texts, value), value


def test_secrets_are_names(tmp_path: Path) -> None:
    for value in HOSTILE:
        source = tmp_path / "changed.yaml"
        source.write_text(f"base: dense\nruntime: {{secrets: [{quoted(value)}]}}\n")
        with pytest.raises(MoekitError, match="secrets"):
            checked(str(source), AWS)


@pytest.mark.parametrize(("name", "written"), list(texts_of(Cluster)), ids=lambda text: text if "%" not in text else "")
def test_a_profiles_field(tmp_path: Path, name: str, written: str) -> None:
    dense, path = load("dense"), tmp_path / "profile.yaml"
    container = "pyxis" if name in READ_WITH_PYXIS else "none"
    others = {**PROFILE, "container": container, **({"image": "/i.sqsh"} if container == "pyxis" else {})}
    for value in HOSTILE:
        for form in (value, f"/{value}", f"/{value}:/b"):
            said = {**{key: quoted(word) for key, word in others.items()}, name: written % quoted(form)}
            path.write_text("".join(f"{key}: {word}\n" for key, word in said.items()))
            texts, refusal = answer(lambda: slurm_files(dense, "changed", find_cluster(str(path))))
            if refusal:
                assert name in refusal or "mount" in refusal, (form, refusal)
                continue
            held(texts)
            assert name in NOT_THE_JOBS or arrives(texts, form), form
