"""The flag tables: what is refused, in which words, and that the real parser agrees."""

from __future__ import annotations

import contextlib
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moekit.megatron.table import Complaint, FlagTable, Option, check, load, occurrences, parse_values, shipped
from moekit.problems import MoekitError

TABLE = load("0.19.2")
HANDBOOK = load("d6316eb45")


def only(argv: str, table: FlagTable = TABLE) -> Complaint:
    (complaint,) = check(argv.split(), table)
    return complaint


REFUSED = [
    (
        "unknown",
        "--bf16 --moe-router-topkk 8",
        1,
        "Megatron 0.19.2 has no option `--moe-router-topkk`",
        "did you mean `--moe-router-topk`?",
    ),
    (
        "unknown",
        "--num-expert 64",
        0,
        "Megatron 0.19.2 has no option `--num-expert`",
        "Megatron takes no abbreviations; write `--num-experts`",
    ),
    ("unknown", "--wholly-made-up=3", 0, "Megatron 0.19.2 has no option `--wholly-made-up`", ""),
    ("unknown", "train.sh --bf16", 0, "`train.sh` follows no option", ""),
    ("arity", "--num-experts --bf16", 0, "`--num-experts` needs a value", ""),
    ("arity", "--recompute-modules", 0, "`--recompute-modules` needs at least one value", ""),
    ("arity", "--rampup-batch-size 32 32", 0, "`--rampup-batch-size` needs 3 values, not 2", ""),
    (
        "arity",
        "--rampup-batch-size 1 2 3 4",
        4,
        "`--rampup-batch-size` takes 3 values, so `4` is one too many",
        "",
    ),
    ("arity", "--num-experts 64 65", 2, "`--num-experts` takes 1 value, so `65` is one too many", ""),
    ("arity", "--bf16 true", 1, "`--bf16` is a switch and takes no value, so `true` is one too many", ""),
    ("arity", "--bf16=true", 0, "`--bf16` is a switch and takes no value, so `true` is one too many", ""),
    (
        "arity",
        "--recompute-modules=moe mlp",
        1,
        "`--recompute-modules` takes no more values than the one after `=`, so `mlp` is one too many",
        "",
    ),
    ("type", "--num-experts two", 1, "`--num-experts` takes an integer, not `two`", ""),
    ("type", "--train-iters 1e3", 1, "`--train-iters` takes an integer, not `1e3`", "write `1000`"),
    ("type", "--moe-aux-loss-coeff 1e-3 1e-", 2, "`--moe-aux-loss-coeff` takes a number, not `1e-`", ""),
    (
        "choice",
        "--lr-decay-style WSDD",
        1,
        "`--lr-decay-style` must be one of constant, linear, cosine, inverse-square-root, WSD, not `WSDD`",
        "did you mean `WSD`?",
    ),
    (
        "choice",
        "--attention-backend flashy",
        1,
        "`--attention-backend` must be one of flash, fused, unfused, local, auto, not `flashy`",
        "did you mean `flash`?",
    ),
    ("choice", "--timing-log-level=3", 0, "`--timing-log-level` must be one of 0, 1, 2, not `3`", ""),
    (
        "twice",
        "--seq-length 1 --seq-length 1",
        2,
        "`--seq-length` is given twice",
        "first given as argument 1, again as argument 3",
    ),
    (
        "twice",
        "--no-align-grad-reduce --disable-align-grad-reduce",
        1,
        "`--disable-align-grad-reduce` sets what `--no-align-grad-reduce` already sets",
        "first given as argument 1, again as argument 2",
    ),
    (
        "twice",
        "--rl-partial-rollouts --no-rl-partial-rollouts",
        1,
        "`--no-rl-partial-rollouts` contradicts `--rl-partial-rollouts`",
        "first given as argument 1, again as argument 2",
    ),
]


@pytest.mark.parametrize(("kind", "argv", "position", "what", "hint"), REFUSED, ids=[case[1] for case in REFUSED])
def test_one_thing_wrong_is_one_complaint(kind: str, argv: str, position: int, what: str, hint: str) -> None:
    complaint = only(argv)
    assert (complaint.kind, complaint.what, complaint.hint) == (kind, what, hint)
    assert complaint.position == position


def test_a_negative_value_that_argparse_takes_for_an_option_names_the_form_that_works() -> None:
    missing, stray = check(["--lr", "-1e-5"], TABLE)
    assert missing.what == "`--lr` needs a value"
    assert (stray.what, stray.hint) == (
        "Megatron 0.19.2 has no option `-1e-5`",
        "as a value it is written `--lr=-1e-5`",
    )
    assert check(["--lr=-1e-5"], TABLE) == check(["--lr", "-.5"], TABLE) == []


def test_all_complaints_come_at_once_and_in_order() -> None:
    argv = ["--num-experts", "x", "--bf16", "yes", "--what", "1", "--num-experts", "8"]
    assert [complaint.kind for complaint in check(argv, TABLE)] == ["type", "arity", "unknown", "twice"]


def test_what_is_inferred_says_so() -> None:
    inferred = [name for name in HANDBOOK.entries if HANDBOOK.option(name).inferred]  # type: ignore[union-attr]
    assert sorted(inferred) == [
        "--activation-func-tanh-clamp-scale",
        "--activation-func-tanh-clamp-scale-linear",
        "--moe-num-hash-layers",
        "--moe-router-skip-muon",
        "--moe-shortcut-connection",
        "--moe-shortcut-parallel",
        "--moe-shortcut-post-norm",
        "--moe-use-norm-before-up-proj",
    ]
    assert not any(TABLE.option(name).inferred for name in TABLE.entries)  # type: ignore[union-attr]
    complaint = only("--moe-num-hash-layers x", HANDBOOK)
    assert complaint.what == "`--moe-num-hash-layers` takes an integer, not `x` (inferred from the handbook)"
    assert only("--zzzzzzz", HANDBOOK).hint.startswith("moekit's table of d6316eb45 is inferred: main of 2026-08-22")


def test_values_by_dest() -> None:
    argv = ["--num-experts=64", "--lr", "5e-4", "--disable-bias-linear", "--bf16", "--recompute-modules", "moe", "mlp"]
    argv += ["--moe-layer-freq", "([0]*3+[1]*58)", "--exit-signal", "SIGUSR1", "--onnx-safe", "False", "--data-path"]
    assert parse_values(argv, TABLE) == {
        "num_experts": 64,
        "lr": 5e-4,
        "add_bias_linear": False,
        "bf16": True,
        "recompute_modules": ["moe", "mlp"],
        "moe_layer_freq": "([0]*3+[1]*58)",
        "exit_signal": "SIGUSR1",
        "onnx_safe": True,  # argparse's `type=bool`: any text but the empty one
        "data_path": [],
    }


def test_occurrences_are_cut_at_options_only() -> None:
    argv = ["--lr", "-1", "--spec", "a b", "-x y", "", "-", "--bf16"]
    cut = [(found.name, found.values) for found in occurrences(argv, TABLE)]
    assert cut == [("--lr", ("-1",)), ("--spec", ("a b", "-x y", "", "-")), ("--bf16", ())]


def test_an_unknown_version_is_refused() -> None:
    assert shipped() == ("0.19.2", "d6316eb45")
    with pytest.raises(MoekitError, match=r"no flag table for Megatron `0\.18`\n    hint: it has 0\.19\.2, d6316eb45"):
        load("0.18")


# What the real parser is asked: its own types are not judged by the table, and `--help` is a command, not an option.
JUDGED = sorted(
    name
    for name in TABLE.entries
    if (option := TABLE.option(name)) and (option.choices or option.type in ("int", "float", "str", "bool"))
)
NUMBERS = st.sampled_from(
    ["1", "-1", "0", "64", "1.5", "-.5", "1e-3", "-1e-3", "1_000", "nan", "inf", " 7 ", "+2", "0x10"]
)
WORDS = st.sampled_from(
    ["", "-", "two", "a b", "-a b", "aux_loss", "WSD", "flash", "SIGTERM", "--x y", "--bf16 x", "=", "٣"]
)
STRANGE = st.sampled_from(["--no-such", "--num-expert", "-x", "--no-such=1", "--lr-decay", "---", "--bf16-"])


@st.composite
def one_option(draw: st.DrawFn) -> list[str]:
    name = draw(st.sampled_from(JUDGED))
    option = TABLE.option(name)
    assert isinstance(option, Option)
    word = NUMBERS | WORDS
    if option.choices:
        word = st.sampled_from([str(choice) for choice in option.choices]) | word
    if draw(st.integers(0, 19)) == 0:
        name = draw(STRANGE)
    if draw(st.booleans()) and not option.is_switch:
        return [f"{name}={draw(word)}", *draw(st.lists(word, max_size=1))]
    usual = {None: 1, "+": 2, "*": 2}.get(option.nargs, option.nargs) if not option.is_switch else 0  # type: ignore[arg-type]
    size = draw(st.sampled_from([usual, usual, usual, draw(st.integers(0, 4))]))
    return [name, *draw(st.lists(word, min_size=size, max_size=size))]


@pytest.mark.megatron
def test_the_real_parser_agrees() -> None:
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    answers = {True: 0, False: 0}

    def real_values(argv: list[str]) -> dict[str, object] | None:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit, KeyError):
            return vars(parser.parse_args(argv, argparse.Namespace()))  # KeyError: an enum's unknown name
        return None

    @settings(max_examples=400, deadline=None, database=None, derandomize=True)
    @given(st.lists(one_option(), max_size=3))
    def agrees(options: list[list[str]]) -> None:
        argv = [word for option in options for word in option]
        complaints = [complaint for complaint in check(argv, TABLE) if complaint.kind != "twice"]
        real = real_values(argv)
        answers[real is not None] += 1
        assert (not complaints) == (real is not None), (argv, complaints)
        if real is not None and not any(complaint.kind == "twice" for complaint in check(argv, TABLE)):
            for dest, value in parse_values(argv, TABLE).items():
                assert repr(getattr(real[dest], "name", real[dest])) == repr(value), (argv, dest)

    agrees()
    assert min(answers.values()) > 60  # both answers were really asked for
