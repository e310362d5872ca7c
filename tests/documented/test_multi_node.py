"""The files to copy of docs/multi-node.md: the page shows them as they are, for Slurm and KubeRay to read."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from blocks import blocks

from verl_omni.config.keys import known_keys

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples/multi_node"
# Of the custom resources of KubeRay 1.x (ray.io/v1).
JOB = {"entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "rayClusterSpec"}
HEAD = {"rayStartParams", "template"}
GROUP = HEAD | {"groupName", "replicas", "minReplicas", "maxReplicas"}


@pytest.mark.parametrize("name", ["slurm.sh", "rayjob.yaml"])
def test_the_page_shows_the_file(name):
    shown = [block.code for block in blocks(ROOT / "docs/multi-node.md") if block.mark.endswith(name)]
    assert shown == [(FILES / name).read_text()]


def test_the_script_is_one_that_bash_and_slurm_read():
    script = FILES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = script.read_text().splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : 1 + len(options)] == options, "sbatch reads none after the first command"
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", option) for option in options)
    (srun,) = re.findall(r"^ *srun .*?[^\\]$", script.read_text(), re.M | re.S)
    assert '--cpus-per-task="$SLURM_CPUS_PER_TASK"' in srun, "from 22.05 on srun does not take over the job's own"


def test_the_job_has_fields_that_kuberay_knows():
    job = yaml.safe_load((FILES / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert set(spec) == JOB and set(spec["rayClusterSpec"]) == {"headGroupSpec", "workerGroupSpecs"}
    head, (workers,) = spec["rayClusterSpec"]["headGroupSpec"], spec["rayClusterSpec"]["workerGroupSpecs"]
    assert set(head) == HEAD and set(workers) == GROUP
    for group in (head, workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted.keys() == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert mounted["shared"] == "/shared", "the same disk at the same path"
        assert container["resources"]["limits"] == container["resources"]["requests"]

    program, command, recipe, *settings = shlex.split(spec["entrypoint"])
    given = dict(setting.split("=") for setting in settings)
    assert (program, command) == ("verl-omni", "train") and given.keys() <= known_keys()
    assert recipe.startswith("/shared/") and given["trainer.default_local_dir"].startswith("/shared/")
    assert int(given["trainer.nnodes"]) == workers["replicas"]
    (container,) = workers["template"]["spec"]["containers"]
    assert given["trainer.n_gpus_per_node"] == container["resources"]["limits"]["nvidia.com/gpu"]
