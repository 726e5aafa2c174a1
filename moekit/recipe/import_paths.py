"""Options whose values are paths: in a recipe the launch decides those, so a path becomes the name it stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from moekit.recipe.import_draft import Draft
from moekit.recipe.shell import Word

_LAUNCH = "the launch says it"
_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")
_DESTS = {
    "save",
    "load",
    "data_path",
    "data_args_path",
    "per_split_data_args_path",
    "data_cache_path",
    "tokenizer_model",
    "moe_routing_trace_path",
    "tensorboard_dir",
}


@dataclass(frozen=True, slots=True)
class Said:
    """One option as the text says it."""

    words: Sequence[Word]
    """The option and its values."""
    values: Sequence[Word]


def is_path(dest: str) -> bool:
    """Whether the launch decides the value of what sets `dest` (see `moekit.launch.run_files.owned_arguments`)."""
    return dest in _DESTS or dest.startswith("wandb_")


def spelled(words: Sequence[Word]) -> str:
    """Words as one line."""
    return " ".join(word.text for word in words)


def say_paths(draft: Draft, paths: Mapping[str, Said]) -> None:
    """Take the path options of a command line, by what they set."""
    for dest, said in paths.items():
        place, was = said.words[0].place, f"was {spelled(said.values)}"
        if dest == "save":
            draft.say("checkpoint.save", place, ["true"], plain=True, comment=was)
        elif dest == "moe_routing_trace_path":
            draft.say("monitor.routing_trace", place, ["true"], plain=True, comment=was)
        elif dest == "load":
            _load(draft, said, paths.get("save"))
        elif dest == "data_path":
            _data(draft, said)
        elif dest == "data_args_path":
            draft.need(said.values)
            draft.say("data.name", place, [_folder(said.values[0].text)], comment=was)
        elif dest == "per_split_data_args_path":
            draft.need(said.values)
            draft.say("data.name", place, [_folder(said.values[0].text)], comment=was)
            draft.say("data.per_split", place, ["true"], plain=True)
        elif dest == "tokenizer_model":
            draft.need(said.values)
            draft.say("data.tokenizer", place, [_tokenizer(said.values[0].text)], comment=was)
        else:
            draft.leave_out(spelled(said.words), place, _LAUNCH)


def _load(draft: Draft, said: Said, save: Said | None) -> None:
    """`--load`: the run's own checkpoint, or another run's."""
    place, path = said.words[0].place, said.values[0].text
    if save and save.values[0].text == path:
        draft.leave_out(spelled(said.words), place, "a run goes on from its own last checkpoint by itself")
        return
    draft.need(said.values)
    own = PurePosixPath(path)
    name = own.parent.name if own.name == "checkpoints" and own.parent.name else own.name
    draft.say("checkpoint.from_run", place, [name], comment=f"was {path}")


def _data(draft: Draft, said: Said) -> None:
    """`--data-path`: shards of one folder, or a blend, whose weights belong into the data set's own list."""
    draft.need(said.values)
    texts = [word.text for word in said.values]
    if not texts:
        draft.leave_out(spelled(said.words), said.words[0].place, "it names no data")
        return
    weighted = len(texts) % 2 == 0 and all(_NUMBER.fullmatch(text) for text in texts[::2])
    prefixes = [PurePosixPath(text) for text in (texts[1::2] if weighted else texts)]
    place = said.words[0].place
    if weighted or len({prefix.parent for prefix in prefixes}) > 1:
        # Not named after its first part: a recipe that passed would train on other data.
        why = "a blend is a data set of its own: list it in its `data-args.txt`, and say its `data.name`"
        draft.leave_out(spelled(said.words), place, why)
        return
    draft.say("data.name", place, [_folder(str(prefixes[0]))], comment=f"was {' '.join(texts)}")
    draft.say("data.shards", place, [prefix.name for prefix in prefixes])


def _folder(path: str) -> str:
    """The name of the folder that a file lies in; the file's own where none is said."""
    own = PurePosixPath(path)
    return own.parent.name or own.name


def _tokenizer(path: str) -> str:
    """The last folder of a tokenizer's path, with the file where it names one."""
    own = PurePosixPath(path)
    is_file = own.suffix in (".model", ".json", ".txt", ".vocab")
    return f"{own.parent.name}/{own.name}" if is_file and own.parent.name else own.name
