#!/usr/bin/env bash
# One-step-off training end to end on a tiny-random Qwen-Image, on GPUs if there are some, else on the CPU. Exits 0 if it
# works.
#
#   [NUM_GPUS=2] [n_gpu_rollout=1] [MODEL_PATH=folder] [adv_estimator=flow_grpo] \
#       bash tests/special_e2e/run_one_step_off_policy.sh [key=value ...]
#
# KEEP_METRICS=file copies the metrics before everything is deleted. Of NUM_GPUS devices (on a CPU: processes) n_gpu_rollout draw and the others train.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
rollout=${n_gpu_rollout:-1}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ -z "${MODEL_PATH:-}" ]; then
    MODEL_PATH=$work/model
    "$python" -m verl_omni.testing.tiny_random QwenImagePipeline "$MODEL_PATH"
fi
"$python" "$here/create_dummy_diffusion_data.py" --output "$work/data"
"$python" -m verl_omni.experimental.one_step_off_policy.main_ppo \
    --config-path=config \
    --config-name=one_step_off_ppo_diffusion_trainer.yaml \
    actor_rollout_ref.hybrid_engine=False \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.lora_rank=8 \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.pipeline.height=32 \
    actor_rollout_ref.rollout.pipeline.width=32 \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=2 \
    algorithm.adv_estimator="${adv_estimator:-flow_grpo}" \
    data.train_files="$work/data/train.parquet" \
    data.val_files="$work/data/test.parquet" \
    data.train_batch_size=4 \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node="$((${NUM_GPUS:-2} - rollout))" \
    rollout.nnodes=1 \
    rollout.n_gpus_per_node="$rollout" \
    trainer.total_training_steps=3 \
    trainer.default_local_dir="$work/run" \
    "$@"
if [ -n "${KEEP_METRICS:-}" ]; then cp "$work/run/metrics.jsonl" "$KEEP_METRICS"; fi
grep -q '"staleness/max": 1.0' "$work/run/metrics.jsonl"
find "$work/run/global_step_3/export" -name '*.safetensors' -size +0 | grep -q .
echo "OK: three steps, samples one step behind, and weights in diffusers' format."
