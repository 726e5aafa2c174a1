"""Each test runs in a process of its own: the answers stay for a process's life."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")

PRELUDE = """
import sys, torch
from moekit.job import cuda_on_cpu

def as_megatron(expression):
    return eval(expression, {"__name__": "megatron.core.somewhere", "torch": torch, **globals_of_test})
globals_of_test = {}
"""


def run(script: str, **env: str) -> str:
    code = PRELUDE + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_devices_streams_and_queries_are_replaced() -> None:
    run("""
        nn, linalg, autograd = torch.nn, torch.linalg, torch.autograd
        spaces = [torch, torch.Tensor, torch.distributed, nn.functional, nn.Module, linalg, autograd]
        before = [dict(vars(space)) for space in spaces]
        cuda_on_cpu.install()
        changed = [{key for key, value in vars(space).items()
                    if old.get(key) is not value and not isinstance(value, type(torch))}
                   for space, old in zip(spaces, before)]
        makers = {*cuda_on_cpu._FACTORIES, "compile"}
        moves = {*cuda_on_cpu._METHODS, "to", "cuda", "type", "is_cuda", "pin_memory", "record_stream"}
        assert changed == [makers, moves, set(), set(), set(), set(), set()], changed
    """)


def test_tensors_asked_for_on_a_gpu_are_made_on_the_cpu() -> None:
    run("""
        cuda_on_cpu.install()
        for device in ("cuda", "cuda:0", 0, torch.device("cuda", 0)):
            assert torch.zeros(2, device=device).device.type == "cpu"
            assert torch.ones(2).to(device).device.type == "cpu"
            assert torch.ones(2).to(device=device, dtype=torch.int).dtype is torch.int
            assert torch.ones(2).new_empty(3, device=device).device.type == "cpu"
        tensor = torch.ones(2)
        assert tensor.cuda(non_blocking=True) is tensor and tensor.pin_memory() is tensor
        assert tensor.to(torch.bfloat16).dtype is torch.bfloat16
        assert tensor.to(torch.zeros(1, dtype=torch.double)).dtype is torch.double
        assert torch.zeros(2, device="meta").device.type == "meta" and torch.zeros(2, device=None).device.type == "cpu"
    """)


def test_megatron_is_told_of_a_gpu_and_torch_is_not() -> None:
    run("""
        cuda_on_cpu.install(capability=(9, 0))
        globals_of_test["tensor"] = tensor = torch.ones(2)
        assert as_megatron("torch.cuda.is_available()") is True and torch.cuda.is_available() is False
        assert as_megatron("tensor.is_cuda") is True and tensor.is_cuda is False
        assert as_megatron("tensor.type()") == "torch.cuda.FloatTensor" and tensor.type() == "torch.FloatTensor"
        assert as_megatron("tensor.bfloat16().type()") == "torch.cuda.BFloat16Tensor"
        assert tensor.type(torch.float64).dtype is torch.float64
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
        assert torch.cuda.get_device_capability() == (9, 0) and torch.cuda.get_device_properties(0).major == 9
        assert torch.cuda.memory_allocated() == 0 and torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0
        assert torch.cuda.mem_get_info()[0] > 1 << 28
    """)


def test_streams_and_events_are_done_at_once() -> None:
    run("""
        cuda_on_cpu.install()
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        assert stream == torch.cuda.current_stream() and stream.query()
        with torch.cuda.stream(stream):
            event.record()
        stream.wait_event(event); stream.wait_stream(torch.cuda.default_stream()); torch.cuda.synchronize()
        end = stream.record_event()
        assert event.query() and event.elapsed_time(end) >= 0
        with torch.cuda.nvtx.range("x"):
            torch.cuda.nvtx.range_push("y"); torch.cuda.nvtx.range_pop()
    """)


def test_random_state_of_the_gpu_is_the_cpu_generator() -> None:
    run("""
        cuda_on_cpu.install()
        torch.cuda.manual_seed(7)
        state, first = torch.cuda.get_rng_state(), torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(first, torch.rand(3))
        torch.manual_seed(7)
        assert torch.equal(first, torch.rand(3))
    """)


def test_meta_makes_shapes_without_memory_for_a_given_capability() -> None:
    run("""
        cuda_on_cpu.install(device="meta", capability=(10, 0))
        assert torch.cuda.get_device_capability() == (10, 0)
        weight = torch.empty(1 << 20, 1 << 20, device=torch.cuda.current_device())
        assert weight.device.type == "meta" and torch.ones(2).cuda().device.type == "meta"
        with torch.device("meta"):
            layer, plain = torch.nn.Linear(1 << 20, 1 << 20), torch.empty(1 << 20, 1 << 20)
        assert layer.weight.device.type == plain.device.type == "meta"
        assert torch.empty(2).device.type == "cpu"
    """)


def test_compile_leaves_functions_as_they_are() -> None:
    run("""
        cuda_on_cpu.install()
        def f(x): return x
        assert torch.compile(f) is f and torch.compile(mode="max-autotune")(f) is f
        assert "torch._dynamo" not in sys.modules
    """)


def test_the_ranks_share_the_cores() -> None:
    out = run("""
        cuda_on_cpu.install()
        import os
        print(torch.get_num_threads() * 2, max(2, len(os.sched_getaffinity(0)) // 2 * 2))
    """, LOCAL_WORLD_SIZE="2")  # fmt: skip
    threads, cores = out.split()
    assert threads == cores
