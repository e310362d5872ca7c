#!/usr/bin/env bash
# Flow-GRPO on Qwen-Image with LoRA, the rollout on devices of its own and one step ahead of the training.
#
#   MODEL_PATH=/models/Qwen-Image DATA_DIR=data/ocr bash examples/flowgrpo_trainer/run_flowgrpo_one_step_off.sh [key=value ...]
#
# The recipe is `verl-omni recipes show qwen_image_ocr_lora`. N_GPUS_TRAINING (4) devices train and N_GPUS_ROLLOUT (4)
# draw.
set -euo pipefail
: "${MODEL_PATH:?set MODEL_PATH to the diffusers folder of Qwen-Image}"
: "${DATA_DIR:?set DATA_DIR to the folder with train.parquet and test.parquet}"
export MODEL_PATH DATA_DIR

exec "${PYTHON:-python3}" -m verl_omni.experimental.one_step_off_policy.main_ppo qwen_image_ocr_lora \
    trainer.mode=one_step_off \
    trainer.n_gpus_per_node="${N_GPUS_TRAINING:-4}" \
    rollout.n_gpus_per_node="${N_GPUS_ROLLOUT:-4}" "$@"
