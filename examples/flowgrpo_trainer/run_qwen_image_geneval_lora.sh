#!/usr/bin/env bash
# Flow-GRPO on Qwen-Image with LoRA and the GenEval reward.
#
#   verl-omni serve-reward geneval --port 8123        # on a device of its own
#   REWARD_ADDRESS=http://127.0.0.1:8123 MODEL_PATH=/models/Qwen-Image DATA_DIR=data/geneval \
#       bash examples/flowgrpo_trainer/run_qwen_image_geneval_lora.sh [key=value ...]
#
# The recipe is `verl-omni recipes show qwen_image_geneval_lora`; what you add here overrides it. NUM_GPUS is 8 unless
# set. Make the data with examples/flowgrpo_trainer/data_process/geneval.py.
set -euo pipefail
: "${MODEL_PATH:?set MODEL_PATH to the diffusers folder of Qwen-Image}"
: "${DATA_DIR:?set DATA_DIR to the folder with train.parquet and test.parquet}"
: "${REWARD_ADDRESS:?set REWARD_ADDRESS to that of the reward server, such as http://127.0.0.1:8123}"
export MODEL_PATH DATA_DIR REWARD_ADDRESS

exec "${PYTHON:-python3}" -m verl_omni.trainer.main_diffusion qwen_image_geneval_lora "$@"
