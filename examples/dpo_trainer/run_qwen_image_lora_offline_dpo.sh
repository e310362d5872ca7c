#!/usr/bin/env bash
# Offline DPO on Qwen-Image with LoRA. Encodes the pairs on the first start, then trains on what it has encoded.
#
#   MODEL_PATH=/models/Qwen-Image PAIRS=pairs.parquet CACHE_DIR=data/pairs \
#       bash examples/dpo_trainer/run_qwen_image_lora_offline_dpo.sh [key=value ...]
#
# PAIRS has columns prompt, chosen and rejected with 512 x 512 images; `python -m verl_omni.data.prepare_offline_dpo
# --help` says what else it may be. The recipe is `verl-omni recipes show qwen_image_lora_offline_dpo`. NUM_GPUS is 8
# unless set.
set -euo pipefail
: "${MODEL_PATH:?set MODEL_PATH to the diffusers folder of Qwen-Image}"
: "${PAIRS:?set PAIRS to the file or folder with prompts, chosen and rejected images}"
: "${CACHE_DIR:?set CACHE_DIR to the folder for the encoded pairs}"
export MODEL_PATH CACHE_DIR

"${PYTHON:-python3}" -m verl_omni.data.prepare_offline_dpo "$MODEL_PATH" "$PAIRS" "$CACHE_DIR" --height 512 --width 512
exec "${PYTHON:-python3}" -m verl_omni.trainer.main_diffusion qwen_image_lora_offline_dpo "$@"
