"""The two small languages, against what they mean and against Megatron's own readers."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moekit.recipe.patterns import HybridPattern, LayerPattern, PipelineLayout


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("[0,1,1]", (0, 1, 1)),
        ("([0]*1+[1]*3)", (0, 1, 1, 1)),
        ("[0]*1+[1]*3", (0, 1, 1, 1)),
        ("([1]*3+[0]*1)*2", (1, 1, 1, 0, 1, 1, 1, 0)),
        ("2*[0,1]", (0, 1, 0, 1)),
        ("[0]+[1]*2*2", (0, 1, 1, 1, 1)),
        ("(([1]))", (1,)),
    ],
)
def test_explicit_patterns(text: str, layers: tuple[int, ...]) -> None:
    pattern = LayerPattern.parse(text)
    assert pattern.layers == layers
    assert pattern.period is None
    assert str(pattern) == text
    assert pattern.is_moe(len(layers)) == tuple(layer == 1 for layer in layers)


def test_a_period_begins_with_the_first_layer() -> None:
    assert LayerPattern.parse("2").is_moe(5) == (True, False, True, False, True)
    assert LayerPattern.parse("1").is_moe(2) == (True, True)


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|t*3L", ("Ettt", "tttL")),
        ("Et|(tt|)*2tmL", ("Et", "tt", "tt", "tmL")),
        ("E,t|t,L", ("Et", "tL")),
        ("E||L", ("E", "", "L")),
        ("Et|m*2|L", ("Et", "mm", "L")),
    ],
)
def test_layouts(text: str, stages: tuple[str, ...]) -> None:
    layout = PipelineLayout.parse(text)
    assert layout.stages == stages
    assert str(layout) == text
    assert layout.count("t") == sum(stage.count("t") for stage in stages)


@pytest.mark.parametrize(
    ("text", "stages", "depths"),
    [
        ("*E*E", ("*E*E",), ()),
        ("M-|*E|E", ("M-", "*E", "E"), ()),
        ("+E/+E/+E", ("+E",), ("+E", "+E")),
        ("|*", ("", "*"), ()),
    ],
)
def test_hybrid_patterns(text: str, stages: tuple[str, ...], depths: tuple[str, ...]) -> None:
    pattern = HybridPattern.parse(text)
    assert (pattern.stages, pattern.depths, str(pattern)) == (stages, depths, text)
    assert pattern.layers == text.split("/")[0].replace("|", "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("*X", "has `X`; a layer is `M`, `G`, `*`, `+`, `D`, `-` or `E`"),
        ("", "has no layer"),
        ("||/*E", "has no layer"),
        ("*E/", "has prediction depths that are not alike"),
        ("*E/*E/*-", "has prediction depths that are not alike"),
        ("*E/*|E", "has prediction depths that are not alike"),
        ("*E+E", "has `*` beside `+` or `D`"),
        ("M" * 5000, "has 5,000 characters"),
    ],
)
def test_wrong_hybrid_patterns(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
        HybridPattern.parse(text)


HUGE = [
    "[1]*9999999999",
    "9" * 5000,
    "[" + "0," * 700_000 + "0]",
    "(" * 500_000,
    "[0]+" * 250_000,
    "[0]*" * 250_000,
    "([1]*5000)*5000",
    "[1]*" + "9" * 4000,
]


@pytest.mark.parametrize("text", HUGE, ids=lambda text: text[:8])
def test_huge_patterns_are_refused_at_once(text: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=r"possible|must be from|more than 100"):
        LayerPattern.parse(text)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "text", ["Et*999999999999L", "E(t|)*10000000L", "E" + "t" * 1_000_000 + "L", "E" + "(t" * 9999]
)
def test_huge_layouts_are_refused_at_once(text: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match="possible"):
        PipelineLayout.parse(text)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "text", ["__import__('os')", "[0]if 1else[1]", "[0]**2", "[0]//2", "[x]", "", "[]", "0x2", "[1.0]"]
)
def test_code_is_no_pattern(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        LayerPattern.parse(text)


SLIP = st.recursive(
    st.sampled_from(["[0]", "[1]", "[0,1]", "[1,1,0]", "2", "0", "3", "07", "[2]", "[]", "[01]", "()", " ", "٣"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "*", "", ","]), inner).map("".join), inner.map(lambda text: f"({text})")
    ),
    max_leaves=8,
)
"""Texts near a pattern, few of which are one."""
PATTERN = st.recursive(
    st.lists(st.sampled_from("01"), min_size=1, max_size=5).map(lambda layers: f"[{','.join(layers)}]"),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("+".join),
        st.tuples(inner, st.integers(1, 4)).map(lambda pair: f"({pair[0]})*{pair[1]}"),
        st.tuples(st.integers(1, 4), inner).map(lambda pair: f"{pair[0]}*({pair[1]})"),
        inner.map(lambda text: f"({text})"),
    ),
    max_leaves=6,
)
LAYOUT_TEXT = st.lists(st.sampled_from([*"Etm|L,()*123", "t*2", "(tt|)*2", "t*12", "m*2", "|t"]), max_size=12).map(
    lambda parts: "".join(parts)
)
SLOWLY = settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore")  # Python's, on what Megatron evaluates
@SLOWLY
@given(st.one_of(PATTERN, SLIP))
@example("([0]*1+[1]*15)")
@example("016")
def test_megatron_reads_patterns_alike(text: str) -> None:
    from megatron.training.arguments import moe_freq_type

    try:
        ours = LayerPattern.parse(text)
    except ValueError:
        return
    assert moe_freq_type(text) == (ours.period if ours.period is not None else list(ours.layers))


@given(PATTERN)
def test_every_pattern_is_read(text: str) -> None:
    assert LayerPattern.parse(text).layers


@pytest.mark.megatron
@SLOWLY
@given(LAYOUT_TEXT)
@example("Ettt|(tt|)*29,m|L")
@example("Et*3|(tt|)*6tmL")
def test_megatron_reads_layouts_alike(text: str) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        ours = PipelineLayout.parse(text)
    except ValueError:
        return
    theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    assert tuple("".join(letters[layer.name] for layer in stage) for stage in theirs) == ours.stages


@pytest.mark.megatron
def test_megatron_reads_hybrid_patterns_alike() -> None:
    from megatron.core.models.hybrid.hybrid_layer_allocation import get_hybrid_total_layer_count, parse_hybrid_pattern

    for letters in itertools.product("*+E|/x", repeat=5):
        text = "".join(letters)
        try:
            ours = HybridPattern.parse(text)
        except ValueError:
            continue
        theirs = parse_hybrid_pattern(text)
        assert (theirs.main_pattern, theirs.mtp_num_depths) == ("|".join(ours.stages), len(ours.depths))
        assert get_hybrid_total_layer_count(text) == len(ours.layers)


@pytest.mark.megatron
def test_megatron_takes_every_layout_we_take() -> None:
    """Our order rules are Megatron's: `validate_layer_layout` takes what we take and stops at what we refuse."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    for letters in itertools.product("Etm|L", repeat=5):
        text = "".join(letters)
        try:
            ours = PipelineLayout.parse(text)
        except ValueError:
            ours = None
        try:
            theirs = PipelineParallelLayerLayout(text, text.count("|") + 1)
            theirs.validate_layer_layout(num_layers=text.count("t"), mtp_num_layers=text.count("m"))
        except (AssertionError, IndexError):
            theirs = None
        outside = text.startswith("|") or text.endswith(
            "|"
        )  # empty outer stages, which no pipeline starts or ends with
        assert (ours is None) == (theirs is None or outside), text
