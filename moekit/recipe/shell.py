"""A training script to the words it starts Megatron with, read and never run.

Assignments are followed from top to bottom. A value that depends on an `if`, a loop or a program is not guessed: it
stays an `Unknown` (`shell_words`), and is a problem for whoever needs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from moekit.problems import MoekitError, Problem
from moekit.recipe.nodes import Place
from moekit.recipe.shell_values import Variables, expand, unknown_char
from moekit.recipe.shell_words import (
    Array,
    Char,
    Chars,
    Heredoc,
    Operator,
    Raw,
    Token,
    Unknown,
    Unreadable,
    lettered,
    spelled,
    tokens,
)
from moekit.recipe.shell_world import scheduler, world_size

_OPENING = {"if", "for", "while", "until", "case", "select"}
_CLOSING = {"fi": "if", "done": "for while until select", "esac": "case", "}": "{ && || function{"}
_BETWEEN = {"then", "else", "elif", "do", "!", "time", "exec", "nohup", "env", "command"}
_DECLARING = {"export", "declare", "typeset", "readonly", "local"}
_HARMLESS = {"echo", "printf", "cat", "cp", "mv", "rm", "ls", "test", "[", "[[", "chmod", "touch", "ln", "tee", "set"}
"""Programs that name a Python file without running it."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_MOST_SHELLS = 4
_BROKEN = "the line before must end in a `\\`, with nothing behind it"


@dataclass(frozen=True, slots=True)
class Word:
    """One word of Megatron's command line."""

    text: str
    """What is unknown stands as the script spells it."""
    place: Place
    unknown: tuple[Unknown, ...] = ()

    def problems(self) -> list[Problem]:
        """One for each piece that is not known."""
        return [
            Problem(f"{self.place.file}:{unknown.line}", unknown.what, unknown.hint or _hint(unknown.spelled))
            for unknown in self.unknown
        ]


@dataclass(frozen=True, slots=True)
class Script:
    """What a text says of a training run."""

    words: tuple[Word, ...]
    """Megatron's arguments."""
    gpus: int | None
    """The world size; None where the text does not say it."""
    environment: Mapping[str, Word | None]
    """Exported variables; None for those that are only handed on from the launching shell."""


def megatron_words(text: str, shown: str, defines: Mapping[str, str]) -> Script:
    """The arguments Megatron is started with by a bash script, or those of a bare command line.

    A bare command line begins with an option; its words are quoted for a shell, or stand one a line as they are
    (`argv.first`). `defines` are values that win over the script's own.

    Raises:
        MoekitError: not readable as bash, no command that runs a Python file, or several of them.
    """
    text = text.replace("\r\n", "\n")
    if "\0" in text:
        raise MoekitError(Problem(shown, "has a null character", "is this the right file?"))
    shell = _Shell(shown, Variables({**scheduler(text)}, frozenset(defines)))
    shell.variables.values |= {name: [lettered(value)] for name, value in defines.items()}
    unused = [name for name in defines if not re.search(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?!\w)", text)]
    if unused:
        raise MoekitError(*(Problem(shown, f"`--set {name}`: nothing here has that name") for name in unused))
    try:
        if (bare := _bare(text, shell.variables)) is not None:
            return Script(tuple(shell.word(chars) for chars in bare), world_size((), shell.variables), {})
        shell.run(lettered(text))
    except Unreadable as reason:
        line, what, hint = reason.args
        raise MoekitError(Problem(f"{shown}:{line}", what, hint)) from None
    return shell.script()


def _bare(text: str, variables: Variables) -> list[Chars] | None:
    """The words of a text that has no command, only options; None for a script."""
    lines = [line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    if not lines or not lines[0].lstrip().startswith("-"):
        return None
    if not any(line.startswith("-") and re.search(r"\s", line) for line in lines):  # a word a line, as it is
        numbered = enumerate(text.split("\n"), 1)
        return [lettered(line, number) for number, line in numbered if line.strip() and not line.startswith("#")]
    return [word for token in tokens(lettered(text), plain=True) if isinstance(token, Raw)
            for word in expand(token.chars, variables)]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Command:
    """One start of a Python file."""

    launcher: list[Chars]
    file: str
    arguments: list[Chars]
    line: int


@dataclass
class _Shell:
    """Where a script has come to."""

    shown: str
    variables: Variables
    exported: dict[str, int] = field(default_factory=dict)
    """The line of each exported name."""
    commands: list[_Command] = field(default_factory=list)
    blocks: list[tuple[str, int]] = field(default_factory=list)
    outer: list[list[Chars]] = field(default_factory=list)
    """The launchers around the text that is read: `srun` around `bash -c`."""

    def word(self, chars: Chars, line: int = 1) -> Word:
        """A word with its place."""
        place = Place(self.shown, chars[0].line if chars else line)
        return Word(spelled(chars), place, tuple(char.unknown for char in chars if char.unknown))

    def run(self, chars: Chars) -> None:
        """Follow a text, command by command."""
        command: list[Token] = []
        joined, before = "", ""
        for token in tokens(chars):
            operator = token.text if isinstance(token, Operator) else ""
            if not operator:
                command.append(token)
            elif operator == "(" and command:
                _check_bracket(command, _line(token))
            elif operator == ")" and before == "(" and len(command) == 1:
                self.blocks.append(("function", _line(command[0])))
                command = []
            elif operator != "\n" or command or not joined:  # a line may end behind `&&`
                if not (operator in (")", "|") and self.blocks and self.blocks[-1][0] == "case"):
                    self.finish(command, joined)
                command, joined = [], operator if operator in ("&&", "||") else ""
                self.bracket(operator, _line(token))
            before = operator
        self.finish(command, joined)

    def bracket(self, operator: str, line: int) -> None:
        """Begin or end a subshell; a `)` can also end a pattern of `case`."""
        if operator == "(":
            self.blocks.append(("(", line))
        elif operator == ")" and self.blocks and self.blocks[-1][0] == "(":
            self.blocks.pop()

    def finish(self, command: Sequence[Token], joined: str) -> None:
        """Take one command, behind `joined` (`&&`, `||` or nothing)."""
        command = list(command)
        while command and isinstance(command[0], Raw) and (word := command[0].text):
            if word in _OPENING:
                self.blocks.append((word, command[0].line))
                if word in ("for", "select") and len(command) > 1 and isinstance(command[1], Raw):
                    self.assign(command[1].text, [[]], command[1].line)
                if word in ("for", "select", "case"):
                    return
            elif word in _CLOSING:
                if self.blocks and self.blocks[-1][0] in _CLOSING[word].split():
                    self.blocks.pop()
            elif word == "{":
                opened = self.blocks.pop() if self.blocks and self.blocks[-1][0] == "function" else None
                self.blocks.append(("function{", opened[1]) if opened else (joined or "{", command[0].line))
            elif word == "function":
                last = command[-1]
                begun = isinstance(last, Raw) and last.text == "{"
                self.blocks.append(("function{" if begun else "function", command[0].line))
                return
            elif word not in _BETWEEN:
                break
            command.pop(0)
        if not command:
            return
        if joined:
            self.blocks.append((joined, _line(command[0])))
        self.simple(command)
        if joined:
            self.blocks.pop()

    def simple(self, command: list[Token]) -> None:
        """Take a command without keywords."""
        if isinstance(command[0], Raw) and re.match(r"--[a-z]", command[0].text):
            raise Unreadable(_line(command[0]), f"begins a command with `{command[0].text}`", _BROKEN)
        heredocs = [token for token in command if isinstance(token, Heredoc)]
        command = [token for token in command if not isinstance(token, Heredoc)]
        assigned = 0
        while assigned < len(command) and (isinstance(command[assigned], Array) or _assigns(command[assigned])):
            assigned += 1
        names = [self.assignment(token) for token in command[:assigned]]
        rest = command[assigned:]
        if not rest:
            return
        first = rest[0].text if isinstance(rest[0], Raw) else ""
        if first in _DECLARING:
            self.declare(first, rest[1:])
            return
        words = [word for token in rest if isinstance(token, Raw) for word in expand(token.chars, self.variables)]
        if first in ("read", "mapfile", "readarray", "unset"):
            line = _line(rest[0])
            for name in (spelled(word) for word in words[1:]):
                if first == "unset":
                    self.variables.values.pop(name, None)
                elif name.isidentifier():
                    self.assign(name, [[unknown_char(first, line, f"`{first}` gives `{name}` its value")]], line)
        elif words and first not in _HARMLESS:
            before = len(self.commands)
            self.start(words, heredocs)
            if len(self.commands) > before:
                self.exported |= dict.fromkeys(names, _line(command[0]))

    def declare(self, builtin: str, rest: Sequence[Token]) -> None:
        """Take `export`, `declare` and the like."""
        exports = builtin == "export"
        for token in rest:
            text = token.text if isinstance(token, Raw) else ""
            if text.startswith("-"):
                exports = exports or "x" in text
                continue
            name = self.assignment(token) if isinstance(token, Array) or _assigns(token) else text
            if exports and name.isidentifier():
                self.exported[name] = _line(token)

    def assignment(self, token: Token) -> str:
        """Take `NAME=value`, `NAME+=value` or an array; returns the name."""
        if isinstance(token, Array):
            name, appends, line = token.name, token.appends, token.line
            values = [word for item in token.items for word in expand(item.chars, self.variables)]
        else:
            assert isinstance(token, Raw)
            match = _ASSIGNMENT.match(token.text)
            assert match is not None
            name, appends, line = match.group(1), bool(match.group(2)), token.line
            values = expand(token.chars[match.end() :], self.variables, split=False)
        old = self.variables.values.get(name, [])
        if appends and isinstance(token, Array):
            values = [*old, *values]
        elif appends and old:
            values = [[*old[0], *values[0]], *old[1:]]
        self.assign(name, values, line)
        return name

    def assign(self, name: str, values: Sequence[Chars], line: int) -> None:
        """Give a variable its value; within an `if` or a loop, what is new in it is something that nobody knows."""
        if name in self.variables.defined:
            return
        hint = f"`--set {name}=VALUE`"
        if block := next((block for block in reversed(self.blocks) if block[0] != "{"), None):
            word, begins = block
            what = f"`{name}` depends on the `{word}` of line {begins}, which moekit does not decide"
            if word.startswith("function"):
                what = f"`{name}` is set by the function of line {begins}, which moekit does not call"
            else:
                hint += f", or a copy of the script without the `{word}`"
            values = _extended(self.variables.values.get(name, []), values, unknown_char(f"${name}", line, what, hint))
        self.variables.values[name] = [[_hinted(char, hint) for char in value] for value in values]

    def start(self, words: list[Chars], heredocs: Sequence[Heredoc]) -> None:
        """Take a program's start: note it where it runs a Python file, follow it where it is a shell."""
        texts = [spelled(word) for word in words]
        programs = [PurePosixPath(text).name for text in texts]
        inner: list[tuple[Chars, list[Chars]]] = []
        if programs[0] == "eval":
            inner.append(([char for word in words[1:] for char in (*word, *lettered(" "))], []))
        for number, program in enumerate(programs[:-1]):
            if program in ("bash", "sh") and (
                flag := next((n for n, text in enumerate(texts) if n > number and re.fullmatch(r"-\w*c", text)), 0)
            ):
                inner += [(word, words[:number]) for word in words[flag + 1 : flag + 2]]
                break
        if programs[0] in ("sbatch", "bash", "sh", "srun"):
            for heredoc in heredocs:
                body = expand(heredoc.chars, self.variables, False, True)[0] if heredoc.expands else heredoc.chars
                inner.append((body, words))
        if inner:
            for text, around in inner[: _MOST_SHELLS - len(self.outer)]:
                self.outer.append(around)
                self.run(text)
                self.outer.pop()
            return
        file = next((n for n, text in enumerate(texts) if text.endswith(".py") and not text.startswith("-")), None)
        if file is not None and file + 1 < len(words):
            launcher = [word for around in self.outer for word in around] + words[:file]
            line = words[file][0].line if words[file] else 0
            self.commands.append(_Command(launcher, programs[file], words[file + 1 :], line))

    def script(self) -> Script:
        """What was found, once the text is at its end."""
        commands = self.commands
        if len(commands) > 1:
            commands = [command for command in commands if "train" in command.file] or commands
        if not commands:
            what = "no command here runs a Python file, and the text does not begin with an option"
            hint = "give the script that has `pretrain_gpt.py`, or Megatron's options alone"
            raise MoekitError(Problem(self.shown, what, hint))
        if len(commands) > 1:
            where = ", ".join(f"`{command.file}` at line {command.line}" for command in commands)
            what, hint = f"starts training more than once: {where}", "leave one of them in a copy of the script"
            raise MoekitError(Problem(f"{self.shown}:{commands[1].line}", what, hint))
        (command,) = commands
        words = tuple(self.word(chars, command.line) for chars in command.arguments)
        environment: dict[str, Word | None] = {}
        for name, line in self.exported.items():
            value = self.variables.values.get(name)
            environment[name] = None if value is None else self.word(value[0] if value else [], line)
        return Script(words, world_size(command.launcher, self.variables), environment)


def _assigns(token: Token) -> bool:
    return isinstance(token, Raw) and bool(_ASSIGNMENT.match(token.text))


def _line(token: Token) -> int:
    return token.chars[0].line if isinstance(token, Heredoc) else token.line


def _extended(old: Sequence[Chars], new: Sequence[Chars], end: Char) -> Sequence[Chars]:
    """`old` with the letter `end` for what `new` adds to it; that letter alone where `new` does not begin with it."""
    reason = end.unknown.spelled if end.unknown else ""
    if any(char.unknown and char.unknown.spelled == reason for value in old for char in value):
        return old  # is unknown for the same reason already
    if len(old) == len(new) == 1 and list(new[0][: len(old[0])]) == list(old[0]):
        return [[*old[0], end._replace(letter=" ", unknown=None), end]]
    return [*old, [end]] if list(new[: len(old)]) == list(old) else [[end]]


def _hinted(char: Char, hint: str) -> Char:
    """A letter whose unknown piece has a hint."""
    if char.unknown is None or char.unknown.hint:
        return char
    return char._replace(unknown=replace(char.unknown, hint=hint))


def _check_bracket(command: Sequence[Token], line: int) -> None:
    """A `(` within a command: a function's, a loop's or a comparison's; where it is none of them, bash refuses it."""
    texts = [token.text for token in command if isinstance(token, Raw)]
    if len(command) > 1 and "[[" not in texts and texts[:1] not in (["for"], ["case"], ["function"], ["select"]):
        raise Unreadable(line, "has a `(` within a command", "put the word into quotes")


def _hint(text: str) -> str:
    if re.fullmatch(r"\$\d+", text):
        return f"`--set {text[1:]}=VALUE`"
    return "write its value into a copy of the script"
