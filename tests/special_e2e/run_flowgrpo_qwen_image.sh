#!/usr/bin/env bash
# Flow-GRPO end to end on a tiny-random Qwen-Image, on a GPU if there is one, else on the CPU. Exits 0 if it works.
#
#   [NUM_GPUS=1] [MODEL_PATH=folder] [ALGORITHM=flow_grpo] bash tests/special_e2e/run_flowgrpo_qwen_image.sh [key=value ...]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ -z "${MODEL_PATH:-}" ]; then
    MODEL_PATH=$work/model
    "$python" -m verl_omni.testing.tiny_random QwenImagePipeline "$MODEL_PATH"
fi
"$python" "$here/create_dummy_diffusion_data.py" --output "$work/data"
"$python" -m verl_omni.trainer.main_diffusion \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.algorithm="${ALGORITHM:-flow_grpo}" \
    actor_rollout_ref.model.lora_rank=8 \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.pipeline.height=64 \
    actor_rollout_ref.rollout.pipeline.width=64 \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=4 \
    actor_rollout_ref.rollout.pipeline.true_cfg_scale=4.0 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.ppo_mini_batch_size=2 \
    data.train_files="$work/data/train.parquet" \
    data.val_files="$work/data/test.parquet" \
    data.train_batch_size=4 \
    trainer.n_gpus_per_node="${NUM_GPUS:-1}" \
    trainer.total_training_steps=2 \
    trainer.default_local_dir="$work/run" \
    "$@"
find "$work/run/global_step_2/export" -name '*.safetensors' -size +0 | grep -q .
echo "OK: two steps, a validation before and after, and weights in diffusers' format."
