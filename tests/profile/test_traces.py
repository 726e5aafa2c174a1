"""Traces with known answers, the real profiler's, and files that are none."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_traces import (
    EXPOSED_US,
    GEMM,
    HIDDEN_US,
    KERNELS,
    PERMUTE,
    SEND,
    SHARE_US,
    gpu_events,
    kernel,
    operator,
    step,
    write,
    write_nsys,
)

from moekit.problems import MoekitError
from moekit.profile import json_events
from moekit.profile.chrome import read as read_chrome
from moekit.profile.families import of_kernel, of_operator
from moekit.profile.shares import shares_of
from moekit.profile.traces import read


def in_us(times: dict[str, int]) -> dict[str, float]:
    return {family: ns / 1000 for family, ns in times.items()}


@pytest.mark.parametrize("name", ["rank-3.json", "rank-3.json.gz", "trace.sqlite"])
def test_shares_of_a_made_step(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith("sqlite"):
        write_nsys(path)
    else:
        write(path, gpu_events(), rank=3)
    (rank,) = read(str(path), [], None).ranks
    assert in_us(rank.share_ns) == SHARE_US
    assert (rank.exposed_ns, rank.hidden_ns) == (EXPOSED_US * 1000, HIDDEN_US * 1000)
    assert not rank.on_cpu
    assert [stream.name for stream in rank.streams] == ["stream 7", "stream 30", "stream 31"]
    assert rank.streams[1].busy_ns == {"all-to-all": 50_000}
    if not name.endswith("sqlite"):
        assert (rank.name, rank.steps, rank.unnamed_sends) == ("rank 3", 1, 0)
    else:
        assert (rank.name, rank.steps, rank.unnamed_sends) == ("trace device 0", None, 2)


def test_pipeline_sends_are_no_all_to_all(tmp_path: Path) -> None:
    (rank,) = read(str(write(tmp_path / "t.json", gpu_events(collective="send"))), [], None).ranks
    assert rank.busy_ns["all-to-all"] == 0
    (unnamed,) = read(str(write(tmp_path / "u.json", gpu_events(collective=""))), [], None).ranks
    assert unnamed.unnamed_sends == 2
    assert unnamed.busy_ns["all-to-all"] == 50_000


def test_copies_and_devices_of_an_export(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "n.sqlite", [*KERNELS, ("memcpy", 9, 75, 80)], devices=2)
    ranks = read(str(path), [], 4).ranks
    assert [rank.name for rank in ranks] == ["n device 0", "n device 1"]
    assert all(rank.steps == 4 and rank.share_ns["idle"] == 0 for rank in ranks)
    assert ranks[1].share_ns["permute and copy"] == 11_000


def test_experts_products_are_told_by_who_launched_them(tmp_path: Path) -> None:
    launches = [
        {**operator("_GroupedLinear", 0, 9), "args": {"External id": 11}},
        {**operator("aten::mm", 9, 12), "args": {"External id": 12}},
        {**operator("no args at all, grouped", 12, 13)},
    ]
    kernels = [
        kernel(GEMM, 7, 0, 10, **{"External id": 11}),
        kernel(PERMUTE, 7, 10, 15, **{"External id": 11}),
        kernel(GEMM, 7, 15, 40, **{"External id": 12}),
    ]
    (rank,) = read(str(write(tmp_path / "t.json", [*launches, *kernels])), [], None).ranks
    expected = {"grouped GEMM": 10, "permute and copy": 5, "other GEMM": 25}
    assert {family: us for family, us in in_us(rank.share_ns).items() if us} == expected


def test_the_rank_of_a_trace_that_does_not_say_it(tmp_path: Path) -> None:
    for name, rank in (("rank-12.json", "rank 12"), ("worker.json", "worker")):
        (tmp_path / name).write_text(json.dumps(gpu_events()))  # the other form: a list alone
        assert [one.name for one in read(str(tmp_path / name), [], None).ranks] == [rank]


def test_processes_that_each_see_one_device(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "n.sqlite", [*KERNELS, ("memcpy", 9, 75, 80)], pids=(70, 80))
    ranks = read(str(path), [], 1).ranks
    assert [rank.name for rank in ranks] == ["n device 0 process 70", "n device 0 process 80"]
    assert all(rank.share_ns["permute and copy"] == 11_000 for rank in ranks)


def test_kernels_whose_time_cupti_could_not_take(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "n.sqlite", [*KERNELS, (GEMM, 7, -(10**6), -(10**6)), (GEMM, 7, 50, 40)])
    (rank,) = read(str(path), [], None).ranks
    assert in_us(rank.share_ns) == SHARE_US
    assert rank.skipped == 2


def test_without_kernels_the_training_threads_operators(tmp_path: Path) -> None:
    events = [
        operator("CheckpointFunctionBackward", 10, 90),
        operator("aten::mm", 20, 40),
        operator("_AllToAll", 40, 60),
        operator("aten::copy_", 50, 55),
        operator("gloo:all_reduce", 0, 30, thread=6),
        step(3, 0, 100),
    ]
    (rank,) = read(str(write(tmp_path / "t.json", events)), [], None).ranks
    assert rank.on_cpu
    assert in_us(rank.share_ns) == {
        **dict.fromkeys(SHARE_US, 0),
        "other GEMM": 20,
        "all-to-all": 15,
        "permute and copy": 5,
        "other compute": 40,
        "idle": 20,
    }


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3x64x128", "attention"),
        ("void transformer_engine::scaled_softmax_warp_forward<__half>", "attention"),
        ("cutlass::gemm::kernel::GemmGrouped<...>", "grouped GEMM"),
        ("void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>", "grouped GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "other GEMM"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x1_tn_align8>", "other GEMM"),
        ("_unpermute_kernel", "permute and copy"),
        ("void at::native::vectorized_gather_kernel<16, long>", "permute and copy"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>", "permute and copy"),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>", "all-to-all"),
        ("void deep_ep::internode::combine<...>", "all-to-all"),
        ("void hybrid_ep::dispatch_kernel<...>", "all-to-all"),
        ("void deep_ep::layout::get_dispatch_layout<256, 32, 4>", "permute and copy"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "other communication"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "other compute"),
        ("void (anonymous namespace)::softmax_warp_forward<float>", "other compute"),
        ("multi_tensor_apply_kernel<AdamFunctorMaster>", "other compute"),
    ],
)
def test_families_of_kernels(name: str, family: str) -> None:
    assert of_kernel(name) == family


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("aten::_grouped_mm", "grouped GEMM"),
        ("aten::addmm", "other GEMM"),
        ("aten::mul", "other compute"),
        ("aten::_softmax", "attention"),
        ("aten::_log_softmax", "other compute"),
        ("aten::scaled_dot_product_attention", "attention"),
        ("c10d::allreduce_", "other communication"),
        ("c10d::alltoall_base_", "all-to-all"),
        ("_GatherFromSequenceParallelRegion", "other communication"),
        ("aten::index_select", "permute and copy"),
        ("aten::t", "other compute"),
        ("aten::to", "permute and copy"),
    ],
)
def test_families_of_operators(name: str, family: str) -> None:
    assert of_operator(name) == family


# The real profiler


@pytest.mark.megatron
def test_a_trace_of_the_real_profiler(tmp_path: Path) -> None:
    import torch

    layers = torch.nn.Linear(64, 64), torch.nn.MultiheadAttention(64, 4)
    path = tmp_path / "real.json.gz"

    def compute() -> None:
        words = layers[0](torch.randn(16, 8, 64))
        out, _ = layers[1](words, words, words)
        out[torch.randperm(16)].sum().backward()

    plan = torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, schedule=plan, on_trace_ready=lambda done: done.export_chrome_trace(str(path))
    ) as profiler:
        for _ in range(4):
            compute()
            profiler.step()
    (rank,) = read(str(path), [], None).ranks
    assert (rank.on_cpu, rank.steps, rank.skipped) == (True, 2, 0)
    assert sum(rank.share_ns.values()) == rank.whole_ns
    assert all(rank.share_ns[family] > 0 for family in ("attention", "other GEMM", "permute and copy", "other compute"))
    assert rank.share_ns["all-to-all"] == 0


# Reading in batches


def packed(events: list[Any], **form: Any) -> bytes:
    return b"{" + b'"traceEvents":' + json.dumps(events, **form).encode() + b',"otherData":[{"a":[{}]},{"b":"]"}]}'


JSON = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(st.sampled_from('"},{[]\\ é\n:a'), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=4), max_size=12), st.integers(1, 64), st.booleans())
def test_batches_are_what_json_loads(
    tmp_path_factory: pytest.TempPathFactory, events: list[Any], size: int, spaced: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "batches.json"
    path.write_bytes(packed(events, indent=1 if spaced else None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_events, "BATCH", size)
        found = [event for batch in json_events.events(path, {}) for event in batch]
    assert found == events


def test_events_hidden_in_texts_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_events, "BATCH", 100)
    draw = random.Random(1)
    events = [{"name": '"}, {"' * draw.randrange(5), "args": [{"a": 1}, {"b": [{}, {}]}]} for _ in range(200)]
    path = write(tmp_path / "t.json", events, indent=None)
    assert [event for batch in json_events.events(path, {}) for event in batch] == events


def test_without_orjson_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.json.gz", gpu_events())
    with_it = read_chrome(path)
    monkeypatch.setitem(__import__("sys").modules, "orjson", None)
    assert [shares_of(one) for one in read_chrome(path)] == [shares_of(one) for one in with_it]


def test_what_profilers_write_against_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    text = json.dumps({"traceEvents": [*gpu_events(), {"name": "NAN", "args": {"x": 0}}]})
    path.write_bytes(text.replace('"NAN"', '"\xff\t"').replace('"x": 0', '"x": NaN').encode("latin-1"))
    (rank,) = read(str(path), [], None).ranks
    assert in_us(rank.share_ns) == SHARE_US


# Files that are none


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    path.write_bytes(bytes(data))


def sqlite_of(statement: str) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        import sqlite3

        with sqlite3.connect(path) as database:
            database.execute(statement)
        database.close()

    return make


EVENTS = gpu_events()
BROKEN: list[tuple[str, Callable[[Path], object], str]] = [
    ("empty.json", lambda path: path.write_bytes(b""), "is empty"),
    ("text.json", lambda path: path.write_text("hello"), "is no trace: it has no list `traceEvents`"),
    ("other.json", lambda path: path.write_text('{"a": 1}'), "is no trace: it has no list `traceEvents`"),
    ("none.json", lambda path: write(path, []), "has neither kernels nor operators"),
    ("numbers.json", lambda path: write(path, [1, "x", None, [{}]]), "has neither kernels nor operators"),
    ("cut.json", lambda path: cut(write(path, EVENTS)), "ends in the middle"),
    ("cut.json.gz", lambda path: cut(write(path, EVENTS)), "ends in the middle"),
    ("flip.json.gz", lambda path: flip(write(path, EVENTS)), "is damaged"),
    ("garbage.json", lambda path: path.write_text('{"traceEvents": [{"a": nonsense}]}'), "stands what is no JSON"),
    ("deep.json", lambda path: path.write_text('{"traceEvents": [' + '{"a":' * 99_999 + "1"), "ends in the middle"),
    (
        "closed.json",
        lambda path: path.write_text('{"traceEvents": [' + '{"a":' * 99_999 + "1" + "}" * 99_999 + "]}"),
        "stands what is no JSON",
    ),
    ("raw.json", lambda path: path.write_bytes(bytes(range(256)) * 64), "is no trace"),
    ("r.nsys-rep", lambda path: path.write_bytes(b"x"), "is a report that only Nsight Systems can read"),
    ("other.sqlite", sqlite_of("CREATE TABLE a (b)"), "but no export of Nsight Systems"),
    ("nothing.sqlite", sqlite_of("CREATE TABLE StringIds (id, value)"), "has no kernels"),
    ("columns.sqlite", sqlite_of("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (a)"), "cannot be read as an export"),
    ("torn.sqlite", lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(5000)), "cannot be read as an export"),
]


@pytest.mark.parametrize(("name", "make", "said"), BROKEN, ids=[name for name, _, _ in BROKEN])
def test_what_is_no_trace_is_said(name: str, make: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    make(tmp_path / name)
    with pytest.raises(MoekitError) as refused:
        read(str(tmp_path / name), [], None)
    (problem,) = refused.value.problems
    assert said in problem.what
    assert name in problem.what


def test_nonsense_times_are_left_out_and_counted(tmp_path: Path) -> None:
    nonsense = [{**kernel(GEMM, 7, 0, 1), "dur": value} for value in (-1, "5", None, 1e300, True)]
    nonsense += [{**kernel(GEMM, 7, 0, 1), "ts": [1]}, {**kernel(GEMM, 7, 0, 1), "name": 5}]
    (rank,) = read(str(write(tmp_path / "t.json", [*gpu_events(), *nonsense])), [], None).ranks
    assert in_us(rank.share_ns) == SHARE_US
    assert rank.skipped == len(nonsense)


def test_memory_is_a_batchs(tmp_path: Path) -> None:
    """Of 20 MB unpacked: what Python holds at once stays far below the file."""
    import tracemalloc

    path = tmp_path / "large.json.gz"
    one = json.dumps(kernel(SEND, 7, 0, 1), indent=2).encode()
    filler = json.dumps({"ph": "X", "cat": "python_function", "name": "x" * 200, "ts": 0, "dur": 1}, indent=2).encode()
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents": [\n' + one)
        for _ in range(70_000):
            file.write(b",\n" + filler)
        file.write(b"\n]}")
    tracemalloc.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_events, "BATCH", 1 << 18)
        read_chrome(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 << 20  # 9.3, of which 8 are orjson's own; json.load takes 60
