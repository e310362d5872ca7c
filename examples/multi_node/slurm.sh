#!/bin/bash
#SBATCH --job-name=verl-omni
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append

# sbatch slurm.sh mine.yaml trainer.n_gpus_per_node=8
#
# needs a folder that all nodes share, with the environment of verl-omni active in it. Ten minutes before its time is up
# the run finishes its step and saves; a job that is queued again goes on from there.
set -euo pipefail

export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')}"
export RAY_TMPDIR="${RAY_TMPDIR:-/tmp/ray-$SLURM_JOB_ID}"
address="$(python -c 'import ray; print(ray.util.get_node_ip_address())'):$((6400 + SLURM_JOB_ID % 1000))"

ray start --head --node-ip-address "${address%:*}" --port "${address#*:}" --include-dashboard false --block &
nodes=$!
if [ "$SLURM_NNODES" -gt 1 ]; then
  srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$SLURMD_NODENAME" \
    --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    bash -c "until ray start --address $address --block; do sleep 5; done" &
  nodes="$nodes $!"
fi
trap 'kill $nodes 2>/dev/null || true' EXIT

python - "$address" "$SLURM_NNODES" <<'WAIT'
import sys, time
import ray

address, wanted = sys.argv[1], int(sys.argv[2])
for attempt in range(60):
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        break
    except ConnectionError:
        time.sleep(5)
for attempt in range(120):
    if sum(node["Alive"] for node in ray.nodes()) >= wanted:
        sys.exit()
    time.sleep(5)
sys.exit(f"{wanted} nodes were asked for, and {len(ray.nodes())} have come")
WAIT

verl-omni train "$@" ray.address="$address" trainer.nnodes="$SLURM_NNODES" &
run=$!
trap 'kill -TERM $run' TERM
code=0
wait $run || code=$?
while kill -0 $run 2>/dev/null; do  # a signal has ended the wait: the run finishes its step and saves
  wait $run || code=$?
done
exit $code
