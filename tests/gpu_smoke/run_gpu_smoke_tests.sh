#!/usr/bin/env bash
# Short runs of what differs between devices. Works on a CPU too, where it shows only that the scripts run.
#
#   [NUM_GPUS=1] bash tests/gpu_smoke/run_gpu_smoke_tests.sh [number ...]     (no number: all)
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONUNBUFFERED=1 RAY_DEDUP_LOGS=0
actor=actor_rollout_ref.actor model=actor_rollout_ref.model rollout=actor_rollout_ref.rollout

smoke() { bash tests/special_e2e/run_flowgrpo_qwen_image.sh "$@"; }

# A new test is a new number here and a line in `title`.
run() {
    case $1 in
        1) smoke ;;
        2) smoke $model.lora_rank=0 $actor.engine.param_offload=true $actor.engine.optimizer_offload=true ;;
        3) smoke $model.enable_gradient_checkpointing=true $actor.ppo_micro_batch_size_per_gpu=3 ;;
        4) smoke $actor.engine.dtype=float32 $actor.ema_decay=0.9 ;;
        5) ALGORITHM=mix_grpo smoke $rollout.algo.sde_window_size=2 ;;
        *) echo "there is no test $1: expected 1 to 5" >&2; return 2 ;;
    esac
}
title=("" "Flow-GRPO, LoRA" "all weights, offloaded between stages" "gradient checkpointing, small micro-batches"
    "float32, moving average" "MixGRPO, LoRA")

failed=()
for number in ${@:-1 2 3 4 5}; do
    echo "== $number: ${title[$number]:-?}"
    run "$number" || failed+=("$number")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "FAILED: ${failed[*]}" >&2
    exit 1
fi
echo "all passed"
