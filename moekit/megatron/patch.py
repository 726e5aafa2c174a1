"""Upcycling mended in a Megatron-LM checkout itself, for those who launch without moekit; taken back byte for byte.

The repairs are those of `moekit/job/upcycling.py`, which does them in the training process and steps aside where the
checkout has these. Each is a fragment of text in the place of another; line numbers are of the file before.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moekit.problems import MoekitError, Problem, error

TRAINING = "megatron/training/training.py"
UPCYCLING = "megatron/core/transformer/moe/upcycling_utils.py"


@dataclass(frozen=True)
class Change:
    """One defect of Megatron's and what is put in its place."""

    file: str
    """Below the checkout."""
    why: str
    wrong: str
    """Whole lines, as upstream has them; they stand in the file once."""
    right: str
    fixed: tuple[str, ...]
    """What the file has where upstream is right: any of these."""


CHANGES = (
    Change(
        TRAINING,
        "the dense model is given to load_checkpoint as `model`, and the parameter is `ddp_model` (pull request 3646)",
        "                'model': dense_model_for_upcycling,\n",
        "                'ddp_model': dense_model_for_upcycling,  # moekit: the name of load_checkpoint's parameter\n",
        ("                'ddp_model': dense_model_for_upcycling,\n",),
    ),
    Change(
        TRAINING,
        "the dense model is built from the MoE's configuration, so the dense checkpoint does not fit it",
        """\
            model_config = cfg.model
            builder_cls = model_config.get_builder_cls()
""",
        """\
            model_config = cfg.model
            if args.moe_use_upcycling and args.num_experts is None:  # moekit: the dense model, of dense arguments
                model_config = copy.copy(model_config)
                model_config.transformer = copy.copy(model_config.transformer)
                model_config.transformer.num_moe_experts = None
                model_config.transformer.moe_layer_freq = 1
                model_config.transformer.expert_model_parallel_size = args.expert_model_parallel_size
                model_config.transformer.ffn_hidden_size = args.ffn_hidden_size
            builder_cls = model_config.get_builder_cls()
""",
        (),
    ),
    Change(
        UPCYCLING,
        "of a virtual pipeline's chunks, dense and MoE models are given the wrong way round (pull request 5442)",
        """\
            state_dict['model%d' % i] = _convert_to_moe_state_dict(
                dense_model[i].state_dict(), moe_model[i]
            )
""",
        """\
            state_dict['model%d' % i] = _convert_to_moe_state_dict(  # moekit: the MoE, then the dense model
                moe_model[i], dense_model[i]
            )
""",
        ("            state_dict['model%d' % i] = _convert_to_moe_state_dict(moe_model[i], dense_model[i])\n",),
    ),
)

State = Literal["wrong", "mended", "fixed", "unknown"]


def state(change: Change, text: str) -> State:
    """What a file has of a change: the defect, moekit's mending, upstream's own, or something else."""
    wrong, mended = text.count(change.wrong), text.count(change.right)
    if wrong + mended == 1:
        return "wrong" if wrong else "mended"
    return "fixed" if not wrong + mended and any(fragment in text for fragment in change.fixed) else "unknown"


def changed(texts: Mapping[str, str], undo: bool = False) -> tuple[dict[str, str], list[str]]:
    """The texts of the files with every change that they need (or without any), and a line on each change.

    Raises:
        MoekitError: with every change of which a file has neither the defect nor a mending.
    """
    new, said, problems = dict(texts), [], []
    for change in CHANGES:
        text = texts[change.file]
        now = state(change, text)
        before, after = (change.right, change.wrong) if undo else (change.wrong, change.right)
        if now == "unknown":
            problems.append(_unknown(change))
        elif now == "fixed":
            said.append(f"{change.file}: right as upstream has it, so nothing to mend: {change.why}")
        elif now == ("wrong" if undo else "mended"):
            said.append(f"{change.file}:{_line(text, after)}: {'not there' if undo else 'there already'}: {change.why}")
        else:
            new[change.file] = new[change.file].replace(before, after)
            said.append(f"{change.file}:{_line(text, before)}: {'taken back' if undo else 'mended'}: {change.why}")
    if problems:
        raise MoekitError(*problems)
    return new, said


def _line(text: str, fragment: str) -> int:
    return text[: text.index(fragment)].count("\n") + 1


def _unknown(change: Change) -> Problem:
    looked_for = " ".join(change.wrong.split())
    what = f"this Megatron is another than those known: `{looked_for}` is not there, once"
    return Problem(change.file, what, f"nothing was changed; to be mended: {change.why}")


def difference(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """A unified diff that `git apply` and `patch -p1` take."""
    lines: list[str] = []
    for file, text in old.items():
        before, after = text.splitlines(keepends=True), new[file].splitlines(keepends=True)
        lines += difflib.unified_diff(before, after, f"a/{file}", f"b/{file}")
    return "".join(lines)


def read(checkout: Path) -> dict[str, str]:
    """The texts of the files that are changed, with the line ends they have.

    Raises:
        MoekitError: one of them cannot be read, or is not UTF-8.
    """
    texts = {}
    for file in dict.fromkeys(change.file for change in CHANGES):
        try:
            texts[file] = (checkout / file).read_bytes().decode("utf-8")
        except OSError as reason:
            what = f"`{file}` cannot be read: {(reason.strerror or str(reason)).lower()}"
            raise error(what, "give the folder of a Megatron-LM checkout", str(checkout)) from None
        except UnicodeDecodeError:
            raise error(f"`{file}` is not UTF-8", where=str(checkout)) from None
    return texts


def write(checkout: Path, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """Write the files that are other than before, each at once or not at all.

    Raises:
        MoekitError: one of them cannot be written.
    """
    files = [file for file in new if new[file] != old[file]]
    temporaries = {file: (checkout / file).with_name(f".{Path(file).name}.{os.getpid()}") for file in files}
    try:
        for file, temporary in temporaries.items():
            temporary.write_bytes(new[file].encode("utf-8"))
            shutil.copymode(checkout / file, temporary)
        for file, temporary in temporaries.items():
            temporary.replace(checkout / file)
    except OSError as reason:
        what = f"`{reason.filename}` cannot be written: {(reason.strerror or str(reason)).lower()}"
        raise error(what, where=str(checkout)) from None
    finally:
        for temporary in temporaries.values():
            with contextlib.suppress(OSError):
                temporary.unlink()


def patch(checkout: Path, undo: bool = False, only_print: bool = False) -> Sequence[str]:
    """Mend a checkout, or take it back; the lines to print. `only_print` writes nothing and gives the difference.

    Raises:
        MoekitError: it is no checkout, another Megatron than those known, or cannot be written.
    """
    old = read(checkout)
    new, said = changed(old, undo)
    if only_print:
        return difference(old, new).splitlines()
    write(checkout, old, new)
    return said
