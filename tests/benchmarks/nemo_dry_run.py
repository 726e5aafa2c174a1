"""NeMo-Run's dry run of the job that `moekit launch recipes/first_moe.yaml --dry-run` shows: prints an sbatch script.

    python nemo_dry_run.py ARGV_FILE FOLDER

Run by dry_run.py in a Python that has NeMo-Run 0.11.1. ARGV_FILE holds the arguments, one a line; NeMo-Run keeps its
experiment under FOLDER and deletes it.
"""

import sys
from pathlib import Path

import nemo_run


def main() -> None:
    """One node of eight GPUs, a container image, one mount, torchrun, Megatron's script with the recipe's arguments."""
    argv_file, folder = sys.argv[1:]
    executor = nemo_run.SlurmExecutor(
        account="moe",
        partition="gpu",
        nodes=1,
        ntasks_per_node=8,  # for torchrun: eight processes of one task
        gpus_per_node=8,
        exclusive=True,
        time="02:00:00",
        container_image="/fsx/moekit/images/pytorch-26.06-efa.sqsh",
        container_mounts=["/fsx/moekit:/fsx/moekit"],
        env_vars={"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "NCCL_NET_PLUGIN": "ofi"},
        launcher=nemo_run.Torchrun(),
        packager=nemo_run.Packager(),
        tunnel=nemo_run.LocalTunnel(job_dir=folder),
        job_dir=folder,
    )
    script = nemo_run.Script(
        "/fsx/moekit/Megatron-LM/pretrain_gpt.py",
        args=Path(argv_file).read_text(encoding="utf-8").splitlines(),
        entrypoint="python",
    )
    with nemo_run.Experiment("first_moe", executor=executor, base_dir=folder) as experiment:
        experiment.add(script, executor=executor, name="first_moe")
        experiment.dryrun(delete_exp_dir=True)


if __name__ == "__main__":
    main()
