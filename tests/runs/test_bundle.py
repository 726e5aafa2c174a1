"""What goes into a bundle, and what never does."""

import json
import os
import re
import resource
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moekit.launch.rundir import RunDir
from moekit.problems import MoekitError
from moekit.runs.bundle import MIB, Bundle, make, shown, write
from moekit.runs.bundle_mask import Masker
from moekit.runs.bundle_names import expand
from moekit.runs.bundle_parts import Part, excerpt, without_half_a_word

MADE_UP = "q7RtZw4LmX9cVb2NpKs8"
"""The part of made-up secrets that no text may have; each of them has it, and no real one is here."""
KEY_LINES = [(MADE_UP * 4)[at : at + 64] for at in range(8)]
KEY = "\n".join(["-----BEGIN RSA PRIVATE KEY-----", *KEY_LINES, MADE_UP[:12] + "==", "-----END RSA PRIVATE KEY-----"])
SECRETS = {
    "hub": f"hf_{MADE_UP}AbCdEfGhIj",
    "github": f"ghp_{MADE_UP}0123456789abcdef",
    "github, fine": f"github_pat_{MADE_UP}_{MADE_UP}",
    "aws": "AKIAQ7RTZW4LMX9CVB2N",
    "openai": f"sk-proj-{MADE_UP}",
    "slack": f"xoxb-123456789-{MADE_UP}",
    "wandb, old": "9f3c1d7a5b2e8f60419c7d3e5a1b8f2c4d6e0a93",
    "wandb": f"wandb_v1_{MADE_UP}",
    "bearer": f"Authorization: Bearer {MADE_UP}",
    "basic": f"authorization: basic {MADE_UP}==",
    "jwt": f"eyJhbGciOiJI.{MADE_UP}.{MADE_UP}",
    "url": f"https://bot:{MADE_UP}@artifacts.example.org/simple",
    "url of a token": f"https://{MADE_UP}@artifacts.example.org/simple",
    "key": KEY,
    "key, its beginning": "\n".join(KEY.splitlines()[:5]),
    "key, its end": "\n".join(KEY.splitlines()[5:]),
    "shell": f"export MY_API_KEY='{MADE_UP}'",
    "shell, quoted in parts": f"export DB_PASSWORD='abc'\\''{MADE_UP}'",
    "python": f"{{'wandb_api_key': '{MADE_UP}', 'x': 1}}",
    "json": json.dumps({"HF_TOKEN": MADE_UP}),
    "json in json": json.dumps(json.dumps({"HF_TOKEN": MADE_UP})),
    "json, half": f'{{"password": "some words {MADE_UP}',
    "yaml": f"  db_password: some words {MADE_UP}",
    "yaml, block": f"  private_key: |\n    some\n    {MADE_UP}",
    "megatron": f"  wandb_api_key ................................. {MADE_UP}",
    "words": f"--hub-token {MADE_UP}",
    "word a line": f"--hub-token\n{MADE_UP}",
    "list of words": f"['--hub-token', '{MADE_UP}']",
    "camel": f'"apiKey": "{MADE_UP}"',
    "query": f"GET /x?a=1&X-Amz-Signature={MADE_UP}&b=2",
    "curl": f"curl -s -u bot:{MADE_UP} https://example.org",
    "sshpass": f"sshpass -p '{MADE_UP}' true",
    "docker": f"docker login -u bot -p {MADE_UP} registry",
    "header": f'curl -H "Authorization: token {MADE_UP}" https://example.org',
    "webhook": f"https://hooks.slack.com/services/T0/B0/{MADE_UP}",
    "sentence": f"the password is {MADE_UP}",
    "short": "PASSWORD=q7RtZ",
}
TRACES = re.compile(
    "|".join([MADE_UP[:12], MADE_UP[-12:], "q7RtZ", "AKIAQ7", "9f3c1d7a5b", *(line[:20] for line in KEY_LINES)])
)
PEOPLE = {
    "host": ("slurmstepd-gpu-node-07: error: x", "gpu-node-07"),
    "fqdn": ("[W socket.cpp] failed to connect to [gpu-node-08.hall2.example.org]:29500", "hall2"),
    "aws host": ("ip-10-1-2-3.ec2.internal: up", "10-1-2-3"),
    "ip": ("connect to 10.31.7.12:29500 failed", "10.31.7.12"),
    "ipv6": ("connect to fe80::1c2d:3eff:fe4f:5a6b failed", "1c2d"),
    "hardware": ("GID fe80:0000:0000:0000:0002:c903:00ef:5e21", "c903"),
    "email": ("#SBATCH --mail-user=Ada.Lovelace@example.org", "Lovelace"),
    "user": ("File /home/lovelace/x.py", "lovelace"),
    "user, again": ("chown lovelace: denied; USER=lovelace", "lovelace"),
    "user, by ssh": ("ssh -t lovelace@login7 true", "lovelace"),
    "host, by ssh": ("ssh -t lovelace@login7 true", "login7"),
    "ipv6 of ipv4": ("the client [::ffff:10.31.7.12]:29500", "10.31.7.12"),
    "account": ("#SBATCH --account=engines1842", "engines1842"),
}
FILES = (
    *("recipe.yaml", "argv.first", "provenance.json", "job.sbatch", "environment.sh", "decision.json", "retry.json"),
    *("submissions/1.json", "attempts/1/decision.json", "attempts/1/end.json", "attempts/1/software.json"),
    *("attempts/1/installed.json", "attempts/1/exit/rank0.json", "attempts/1/train.log", "attempts/1/metrics.jsonl"),
    "slurm-7.log",
)


def put(run: RunDir, name: str, text: str | bytes) -> Path:
    path = run.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "shared" / "runs" / "x")
    put(run, "recipe.yaml", "model:\n  num_layers: 2\n")
    put(run, "argv.first", f"--lr\n0.001\n--data-cache-path\n/fsx/moe/data/d/cache\n--save\n{run.path}/checkpoints\n")
    put(run, "provenance.json", json.dumps({"moekit": "0.1.0", "found": {"checkout": {"commit": "a" * 39 + "1"}}}))
    put(run, "job.sbatch", "#!/bin/bash\n#SBATCH --nodes=4\n")
    put(run, "jobs/7", "")
    put(run, "attempts/1/decision.json", json.dumps({"time": 1.79e9, "job": "7", "nodes": ["n1", "n2"], "step": 0}))
    put(run, "attempts/1/train.log", "".join(f" iteration {n}/100 | lm loss: 8.1 |\n" for n in range(100)))
    put(
        run,
        "attempts/1/metrics.jsonl",
        '{"event": "config", "config": {"lr": 0.001}}\n{"step": 1, "time": 1.79e9, "metrics": {"lm loss": 8.1}}\n',
    )
    return run


def packed(bundle: Bundle, tmp_path: Path) -> dict[str, str]:
    """The texts of an archive, by their names in its folder, from the archive itself."""
    out = tmp_path / "bundle.tar.gz"
    out.unlink(missing_ok=True)
    write(bundle, out)
    with tarfile.open(out) as archive:
        texts = {}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            texts[member.name.partition("/")[2]] = file.read().decode()
        return texts


# Secrets and names


@pytest.mark.parametrize("kind", SECRETS)
def test_no_secret_of_any_kind_is_in_the_archive_whichever_file_has_it(run: RunDir, tmp_path: Path, kind: str) -> None:
    for name in FILES:
        if name != "recipe.yaml" or kind in ("hub", "yaml", "shell", "json", "key"):
            put(run, name, f"before\n{SECRETS[kind]}\nafter-this-line\n")
    texts = packed(make(run, 5, None), tmp_path)
    for name, text in texts.items():
        assert not TRACES.search(text), name
    assert set(FILES) - set(texts) == {"attempts/1/exit/rank0.json"}  # the ranks are one file
    assert "secrets" in texts["README.txt"]
    assert "after-this-line" in texts["attempts/1/train.log"]


@pytest.mark.parametrize("kind", PEOPLE)
def test_no_name_of_a_machine_or_a_person_is_in_the_archive(run: RunDir, tmp_path: Path, kind: str) -> None:
    said, name = PEOPLE[kind]
    for file in FILES:
        if file != "recipe.yaml":
            put(run, file, f"before\n{said}\nafter-this-line\n")
    for text in packed(make(run, 5, None), tmp_path).values():
        assert name.lower() not in text.lower()


plain = st.text(st.characters(codec="utf-8", exclude_categories=("Co", "Cn")), max_size=30)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(set(SECRETS) - {"short"})), plain, plain)
def test_a_secret_is_masked_wherever_it_stands(kind: str, before: str, after: str) -> None:
    masker = Masker()
    alone = kind.startswith(("key, ", "yaml"))  # of which a line is what shows it
    text = f"{before}\n{SECRETS[kind]}\n{after}" if alone else f"{before} {SECRETS[kind]} {after}"
    masker.learn(text)
    assert not TRACES.search(masker.mask(text))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from([kind for kind in sorted(SECRETS) if "\n" not in SECRETS[kind]]),
    at=st.integers(0, 2500),
    cut=st.integers(0, 80),
    head=st.integers(1, 700),
    tail=st.integers(1, 700),
)
def test_no_cut_of_a_log_leaves_half_a_secret(
    tmp_path: Path, kind: str, at: int, cut: int, head: int, tail: int
) -> None:
    """Wherever beginning and end are cut, and wherever the file itself ends."""
    noise = "".join(f"line {n} of a log\n" for n in range(150))
    at = noise.rfind("\n", 0, at) + 1
    line = SECRETS[kind] + "\n"
    log = tmp_path / "log"
    log.write_text(noise[:at] + line + noise[at:])
    with log.open("rb") as file:
        text = excerpt(file, head, tail)
    whole = excerpt_of(noise[:at] + line[: max(cut, 12)], tmp_path)  # a file that is half written
    masker = Masker()
    masker.learn(text)
    masker.learn(whole)
    assert not TRACES.search(masker.mask(text))
    assert not TRACES.search(masker.mask(whole))


def excerpt_of(text: str, tmp_path: Path) -> str:
    path = tmp_path / "half"
    path.write_text(text)
    with path.open("rb") as file:
        return without_half_a_word(excerpt(file, 10_000, 10_000))


def test_a_value_named_in_one_file_is_masked_in_all(run: RunDir, tmp_path: Path) -> None:
    put(run, "environment.sh", "export SITE_PASSWORD='correct horse/battery'\nexport OURS_PIN=tr0ub4dor\n")
    put(run, "recipe.yaml", "runtime:\n  secrets: [OURS_PIN]\n")
    log = "login with correct horse/battery\n'correct%20horse%2Fbattery' tr0ub4dor\n"
    put(run, "attempts/1/train.log", log)
    texts = packed(make(run, 5, None), tmp_path)
    assert not re.search(r"correct|tr0ub4dor", "".join(texts.values()))
    assert texts["attempts/1/train.log"].startswith("login with [secret")


@pytest.mark.parametrize("length", [330, 370, 385, 390, 395, 399])
def test_a_secret_that_a_message_cuts_is_not_in_what_doctor_says(run: RunDir, tmp_path: Path, length: int) -> None:
    cause = "torch.OutOfMemoryError: CUDA out of memory. "
    put(run, "attempts/1/train.log", f"{cause}{'x ' * ((length - len(cause)) // 2)}{SECRETS['wandb, old']}\n")
    texts = packed(make(run, 5, None), tmp_path)
    assert "CUDA out of memory" in texts["doctor.txt"]
    for text in texts.values():
        assert "9f3c" not in text


def test_a_secret_that_an_exit_record_cuts_is_not_in_what_why_says(run: RunDir, tmp_path: Path) -> None:
    reason = f"ValueError: {'no ' * 660}{SECRETS['wandb, old']}"[:2000]
    assert reason.endswith("9f3c1d7a")
    put(run, "attempts/1/exit/rank0.json", json.dumps({"code": 1, "reason": reason, "time": 1.79e9}))
    texts = packed(make(run, 5, None), tmp_path)
    assert "ValueError: no no" in texts["why.txt"]
    for text in texts.values():
        assert "9f3c" not in text


def test_what_is_no_secret_stays() -> None:
    text = """--moe-token-dispatcher-type
alltoall
--lr
0.001
  pad_token_id .................................... 128001
  eos_token: <|endoftext|>
  tokens_per_step: 2097152
KeyError: 'lm loss'
"recipe_sha256": "4414b71364227249ae14cc996fa6eba73f3416b518bf13e19ae2d1fbe58b9552"
"commit": "d98e8a64d98e8a64d98e8a64d98e8a64d98e8a64"
megatron 0.19.2+d98e8a64d98e8a64d98e8a64d98e8a64d98e8a64
 [2026-11-30 13:37:56] iteration 12/ 60 | elapsed time per iteration (ms): 12.5 | lm loss: 8.1E+00 |
c10::Error at::Tensor 127.0.0.1 localhost:29500 [rank3]: nodes: 2
  File "/usr/local/lib/python3.12/dist-packages/megatron/core/tensor_parallel/mappings.py", line 12, in forward
export HF_TOKEN=$HF_TOKEN
https://huggingface.co/api/models
"""
    masker = Masker()
    masker.learn(text)
    assert masker.mask(text) == text
    assert masker.told() == []


def test_nodes_are_told_apart_and_have_one_name_everywhere(run: RunDir, tmp_path: Path) -> None:
    put(run, "attempts/1/decision.json", json.dumps({"nodes": ["gpu-node-07", "gpu-node-08"], "job": "7"}))
    put(run, "slurm-7.log", "attempt 1 on gpu-node-[07-09,11]\nsrun: error: gpu-node-11: task 3: Exited with 1\n")
    put(run, "attempts/1/train.log", "GPU-node-08.hpc.example.org:1:2 [0] NCCL WARN x\nnode gpu-node-11, device 3\n")
    texts = packed(make(run, 5, None), tmp_path)
    assert re.findall(r"host\d+", texts["attempts/1/decision.json"]) == ["host1", "host2"]
    assert texts["attempts/1/train.log"] == "host2:1:2 [0] NCCL WARN x\nnode host3, device 3\n"
    assert texts["slurm-7.log"] == "attempt 1 on host1,host2,host4,host3\nsrun: error: host3: task 3: Exited with 1\n"
    assert "hpc" not in "".join(texts.values())


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("n[1-4]", "n1 n2 n3 n4"),
        ("gpu-node-07", "gpu-node-07"),
        ("gpu-[08-11,20],login", "gpu-08 gpu-09 gpu-10 gpu-11 gpu-20 login"),
        ("r[1-2]-n[1,3]", "r1-n1 r1-n3 r2-n1 r2-n3"),
        ("n[1-", "n[1-"),
    ],
)
def test_lists_of_hosts(said: str, names: str) -> None:
    assert list(expand(said)) == names.split()


def test_folders_users_and_file_names(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "home" / "lovelace" / "moe" / "runs" / "lovelace-n7")
    put(run, "recipe.yaml", "")
    put(run, "attempts/1/decision.json", json.dumps({"nodes": ["n7"]}))
    put(
        run,
        "attempts/1/train.log",
        f"{run.path}/job/entry.py /home/lovelace/x {run.path.parents[1]}/data {run.path}2\n",
    )
    bundle = make(run, 5, None)
    assert bundle.name == "moekit-bundle-user1-host1"
    log = packed(bundle, tmp_path)["attempts/1/train.log"]
    assert log.split()[:3] == ["/folder1/job/entry.py", "/home/user1/x", "/folder2/data"]
    assert "lovelace" not in "".join(shown(bundle))


# What is taken


def test_what_is_in_it(run: RunDir, tmp_path: Path) -> None:
    put(run, "attempts/1/exit/rank1.json", '{"code": 0, "reason": "", "time": 2}')
    put(run, "attempts/1/exit/rank0.json", '{"code": 1, "reason": "ValueError: x", "time": 1}')
    put(run, "attempts/1/software.json", '{"torch": "2.13.0"}')
    put(run, "slurm-7.log", "done\n")
    texts = packed(make(run, 5, None), tmp_path)
    assert list(texts)[:4] == ["README.txt", "why.txt", "doctor.txt", "recipe.yaml"]
    assert texts["attempts/1/exit.txt"].splitlines()[0].startswith("rank0.json")
    assert "ATTEMPT" in texts["why.txt"]
    assert "looked at" in texts["doctor.txt"]
    assert "moekit 0.1.0" in texts["README.txt"]
    assert "/fsx/moe" not in "".join(texts.values())
    assert "/data/d/cache" in texts["argv.first"]
    assert "a" * 39 + "1" in texts["provenance.json"]


def test_the_same_run_gives_the_same_bytes(run: RunDir, tmp_path: Path) -> None:
    one, other = tmp_path / "1.tar.gz", tmp_path / "2.tar.gz"
    make(run, 5, None)  # puts down the job that no submission names, as `moekit why` does
    write(make(run, 5, None), one)
    write(make(run, 5, None), other)
    assert one.read_bytes() == other.read_bytes()
    assert one.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_run_without_attempts(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "new")
    put(run, "recipe.yaml", "")
    texts = packed(make(run, 5, None), tmp_path)
    assert set(texts) == {"README.txt", "why.txt", "doctor.txt", "recipe.yaml"}


def test_files_that_are_half_written_or_damaged(run: RunDir, tmp_path: Path) -> None:
    put(run, "attempts/1/decision.json", '{"nodes": ["n1", "n')
    put(run, "attempts/1/metrics.jsonl", b'{"step": 1, "metr\xff\xfe\x00')
    put(run, "attempts/1/exit/rank0.json", "{")
    put(run, "provenance.json", b"\x00" * 5000)
    put(run, "retry.json", "[1, 2")
    texts = packed(make(run, 5, None), tmp_path)
    assert texts["attempts/1/decision.json"] == '{"nodes": ["host1", "n'
    assert texts["attempts/1/exit.txt"] == "rank0.json: {\n"


def test_what_cannot_be_read_is_said(run: RunDir, tmp_path: Path) -> None:
    os.mkfifo(run.path / "slurm-8.log")
    (run.path / "retry.json").mkdir()
    (run.path / "end").symlink_to("end")
    denied = put(run, "attempts/1/end.json", "{}")
    denied.chmod(0)
    left = make(run, 5, None).left_out
    assert "slurm-8.log: it is no file" in left
    assert "retry.json: it is no file" in left
    assert any(row.startswith("end: ") for row in left)
    if os.getuid():
        assert "attempts/1/end.json: permission denied" in left


def test_no_link_is_followed_out_of_the_run(run: RunDir, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "train.log").write_text("of another\n")
    (run.path / "slurm-9.log").symlink_to(outside / "train.log")
    (run.path / "attempts" / "2").symlink_to(outside)
    (run.path / "slurm-7.log").symlink_to("attempts/1/train.log")
    bundle = make(run, 5, None)
    texts = packed(bundle, tmp_path)
    assert "of another" not in "".join(texts.values())
    assert "iteration" in texts["slurm-7.log"]
    assert "slurm-9.log: it is a link out of the run" in bundle.left_out
    assert "attempts/2/train.log: it is a link out of the run" in bundle.left_out
    assert "why.txt" not in texts


def test_the_first_cause_in_the_middle_of_a_log_is_in_it(run: RunDir, tmp_path: Path) -> None:
    noise = "".join(f" iteration {n}/9000 | lm loss: 8.1 |\n" for n in range(9000))
    cause = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    after = "".join(f"[rank{n % 64}]: what comes of it {n}\n" for n in range(9000))
    put(run, "attempts/1/train.log", noise + "a line before\n" + cause + after)
    text = packed(make(run, 5, None), tmp_path)["attempts/1/train.log"]
    assert f"a line before\n{cause}" in text
    assert text.startswith(" iteration 0/9000")
    assert text.endswith("what comes of it 8999\n")
    assert len(re.findall(r"\[\.\.\. [\d,]+ bytes left out \.\.\.\]", text)) == 2
    gaps = sum(int(size.replace(",", "")) for size in re.findall(r"\[\.\.\. ([\d,]+) bytes", text))
    kept = len(re.sub(r"\[\.\.\. .*\n", "", text))
    assert kept + gaps == len(noise) + len("a line before\n" + cause + after)


# Its size


def test_it_never_is_larger_than_asked_for(run: RunDir, tmp_path: Path) -> None:
    for number in range(1, 41):
        put(run, f"attempts/{number}/train.log", os.urandom(150_000).hex().replace("7", "\n"))
        put(run, f"attempts/{number}/decision.json", json.dumps({"nodes": [f"n{n}" for n in range(200)]}))
    bundle = make(run, 1, None)
    out = tmp_path / "a.tar.gz"
    assert write(bundle, out) == out.stat().st_size < MIB
    unpacked = subprocess.run(["gzip", "-dc", str(out)], capture_output=True, check=True).stdout
    assert len(unpacked) <= MIB
    names = [part.name for part in bundle.parts]
    assert "attempts/40/train.log" in names
    assert "attempts/2/train.log" not in names
    assert "attempts/2/train.log: there is no room for it" in bundle.left_out
    assert "attempts/1/decision.json" in names


def test_a_line_without_end_is_not_read_into_the_archive(run: RunDir, tmp_path: Path) -> None:
    put(run, "attempts/1/train.log", "begin\n" + "x" * 3_000_000 + "\nend\n")
    text = packed(make(run, 5, None), tmp_path)["attempts/1/train.log"]
    assert len(text) < 200
    assert text.startswith("begin\n")
    assert text.endswith("\nend\n")


def test_a_log_of_200_mb_in_constant_memory(run: RunDir, tmp_path: Path) -> None:
    block = "".join(
        f" iteration {n}/90000 | elapsed time per iteration (ms): {n}.5 | lm loss: 8.1 |\n" for n in range(25000)
    )
    with (run.path / "attempts/1/train.log").open("w") as file:
        for _ in range(200_000_000 // len(block) + 1):
            file.write(block)
    script = (
        "import sys\nfrom pathlib import Path\nfrom moekit.launch.rundir import RunDir\n"
        "from moekit.runs.bundle import make, write\n"
        "write(make(RunDir(Path(sys.argv[1])), 5, None), Path(sys.argv[2]))\n"
        "status = Path('/proc/self/status').read_text()\n"  # getrusage's peak begins with its parent's
        "print(status.partition('VmHWM:')[2].split()[0])\n"
    )
    out = tmp_path / "a.tar.gz"
    began = time.monotonic()
    words = [sys.executable, "-c", script, str(run.path), str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    print(f"{time.monotonic() - began:.1f} s, {int(done.stdout) // 1024} MiB")
    assert int(done.stdout) < 150 * 1024
    assert out.stat().st_size < 5 * MIB


def test_texts_that_are_hard_for_patterns_take_no_longer(tmp_path: Path) -> None:
    """Long words that nearly are what is looked for."""
    hard = ["a." * 30_000, "x" * 60_000, "1:" * 30_000, "token" * 12_000, "-----BEGIN PRIVATE KEY-----\n" * 2000]
    hard += [
        "n[1," * 15_000,
        "://a:" * 12_000,
        "eyJ" * 20_000,
        '\\"' * 30_000,
        "key=" * 15_000,
        "a@" * 30_000,
        "n1-" * 20_000,
    ]
    masker = Masker(hosts=["n1"])
    began = time.process_time()
    for text in hard:
        masker.learn(text)
    for text in hard:
        masker.mask(text)
    assert time.process_time() - began < 20


# Writing it


def test_what_is_there_stays(run: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "a.tar.gz"
    out.write_text("mine")
    with pytest.raises(MoekitError, match=r"`.*a\.tar\.gz` exists already"):
        write(make(run, 5, None), out)
    assert out.read_text() == "mine"


def test_a_full_disk_is_a_message_and_leaves_nothing(run: RunDir, tmp_path: Path) -> None:
    """The system's limit of a file's size stands for the disk's end: the same call fails, in the same place."""
    folder = tmp_path / "full"
    folder.mkdir()
    bundle = Bundle("b", [Part("noise", os.urandom(200_000).hex())], [], [])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(MoekitError, match=r"cannot write `.*b\.tar\.gz`: file too large"):
            write(bundle, folder / "b.tar.gz")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(folder.iterdir()) == []
    with pytest.raises(MoekitError, match=r"no such file or directory"):
        write(bundle, tmp_path / "nowhere" / "b.tar.gz")


def test_the_command(run: RunDir, tmp_path: Path) -> None:
    put(run, "environment.sh", f"export HF_TOKEN={MADE_UP}\n")

    def moekit(*words: str) -> subprocess.CompletedProcess[str]:
        call = [sys.executable, "-m", "moekit", "bundle", str(run.path), *words]
        return subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, check=False)

    shown_only = moekit("--show")
    assert shown_only.returncode == 0, shown_only.stderr
    assert "==> environment.sh <==\nexport HF_TOKEN=[secret1]\n" in shown_only.stdout
    assert not list(tmp_path.glob("*.tar.gz"))
    done = moekit()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("moekit-bundle-x.tar.gz: ")
    assert re.search(r"masked +secrets: 1 different, in 1 place\n", done.stdout)
    assert "left out  nothing" in done.stdout
    assert (tmp_path / "moekit-bundle-x.tar.gz").is_file()
    again = moekit()
    assert again.returncode == 1
    assert again.stderr.startswith("error: `moekit-bundle-x.tar.gz` exists already")
