"""What nvidia-smi and the kernel's log say."""

import pytest
from gpu_double import gpu_rows

from moekit.job.preflight.gpus import FIELDS, are_held_back, judge_alike, judge_gpus, judge_xids, read_gpus

EIGHT: list[dict[str, str]] = [{} for _ in range(8)]


def findings(gpus: list[dict[str, str]], rows: str = "") -> list[tuple[str, str, str]]:
    found = judge_gpus("n1", read_gpus(gpu_rows(gpus)), 8, "h200", rows)
    return [(one.check, one.level, one.what) for one in found]


def test_eight_good_gpus() -> None:
    gpus = read_gpus(gpu_rows(EIGHT))
    assert (len(gpus), gpus[3].name, gpus[3].serial, gpus[3].reasons, gpus[3].temperature_c) == (
        *(8, "NVIDIA H200", "1650923000003", 1, 33),
    )
    assert findings(EIGHT) == []


def test_the_double_prints_what_is_asked_for() -> None:
    assert len(gpu_rows(EIGHT).splitlines()[0].split(", ")) == len(FIELDS)


@pytest.mark.parametrize(
    ("said", "check", "what"),
    [
        ({"clocks_event_reasons.active": "0x48"}, "throttle",
         "GPU 7 is idle at 33 degrees and held back: hardware slowdown, hardware thermal slowdown"),
        ({"clocks_event_reasons.active": "0x80", "temperature.gpu": "[N/A]"}, "throttle",
         "GPU 7 is idle and held back: power brake"),
        ({"ecc.errors.uncorrected.volatile.total": "2"}, "ecc", "GPU 7 has 2 memory errors that ECC could not correct"),
        ({"ecc.mode.current": "Disabled"}, "ecc", "ECC is off on GPU 7"),
        ({"uuid": "GPU-00000000-0000"}, "gpus", "nvidia-smi shows one GPU twice"),
        ({"name": "NVIDIA H100 80GB HBM3"}, "gpus", "its GPUs are NVIDIA H100 80GB HBM3 where the profile says h200"),
    ],
)  # fmt: skip
def test_what_one_gpu_can_have(said: dict[str, str], check: str, what: str) -> None:
    ((found, level, told),) = findings([*EIGHT[:7], said])
    assert (found, told) == (check, what)
    assert level == ("warn" if "Disabled" in said.values() else "fail")


def test_a_gpu_is_missing() -> None:
    assert findings(EIGHT[:7]) == [("gpus", "fail", "nvidia-smi shows 7 GPUs where the job has 8")]


def test_a_row_that_is_cut_is_a_gpu_less() -> None:
    text = gpu_rows(EIGHT)
    assert len(read_gpus(text[:-80])) == 7
    assert read_gpus("No devices were found\n") == []
    unsaid = gpu_rows([{"ecc.errors.uncorrected.volatile.total": "[N/A]", "clocks_event_reasons.active": "[N/A]"}])
    assert (read_gpus(unsaid)[0].uncorrected, read_gpus(unsaid)[0].reasons) == (0, 0)


def test_rows_of_memory() -> None:
    rows = "GPU-00000002-0000, Yes, No\nGPU-00000003-0000, No, Yes\nGPU-00000004-0000, No, No\nGPU-9, No\n"
    assert [what for _, _, what in findings(EIGHT, rows)] == [
        "GPU 2 waits for a reset to remap memory rows",
        "GPU 3 has memory rows that cannot be remapped",
    ]


LOG = """[  100.000000] NVRM: loading NVIDIA UNIX Open Kernel Module
[90000.000000] NVRM: Xid (PCI:0000:59:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[  200.000000] NVRM: Xid (PCI:0000:69:00): 48, pid=1, An uncorrectable double bit error (DBE) has been detected
[90000.000000] NVRM: Xid (PCI:0000:79:00): 94, pid=1, Contained: SRAM error
[90000.000000] NVRM: Xid (PCI:0000:79:00): 31, pid=7, name=python, MMU Fault
"""


def test_xids() -> None:
    found = [(one.level, one.what) for one in judge_xids("n1", LOG, 93600.0)]
    assert found == [
        ("fail", "Xid 79 of the GPU at 0000:59:00, 1.0 h ago"),
        ("warn", "Xid 48 of the GPU at 0000:69:00, 25.9 h ago"),
        ("warn", "Xid 94 of the GPU at 0000:79:00, 1.0 h ago"),
    ]


def test_xids_without_a_time_are_of_now() -> None:
    (found,) = judge_xids("n1", "kernel: NVRM: Xid (PCI:0000:59:00): 79, GPU has fallen off the bus", 5.0)
    assert (found.level, found.own) == ("fail", True)


def test_another_driver() -> None:
    gpus = {f"n{node}": read_gpus(gpu_rows(EIGHT)) for node in range(3)}
    gpus["n9"] = read_gpus(gpu_rows([{"driver_version": "550.1"}]))
    (found,) = judge_alike(gpus)
    assert (found.node, found.level, found.what) == ("n9", "warn", "its driver is 550.1, of other nodes 580.95.05")


def test_a_gpu_that_is_held_back_is_asked_again() -> None:
    assert not are_held_back(gpu_rows(EIGHT))
    assert are_held_back(gpu_rows([*EIGHT[:7], {"clocks_event_reasons.active": "0x20"}]))
    assert not are_held_back("No devices were found\n")
