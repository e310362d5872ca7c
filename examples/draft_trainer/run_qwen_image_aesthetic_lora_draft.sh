#!/usr/bin/env bash
# Direct reward gradients on Qwen-Image with LoRA and LAION's aesthetic mark.
#
#   MODEL_PATH=/models/Qwen-Image DATA_DIR=data/ocr bash examples/draft_trainer/run_qwen_image_aesthetic_lora_draft.sh [key=value ...]
#
# The recipe is `verl-omni recipes show qwen_image_aesthetic_lora_draft`; what you add here overrides it. NUM_GPUS is 8
# unless set. Any prompts will do; examples/flowgrpo_trainer/data_process/qwenimage_ocr.py makes some.
set -euo pipefail
: "${MODEL_PATH:?set MODEL_PATH to the diffusers folder of Qwen-Image}"
: "${DATA_DIR:?set DATA_DIR to the folder with train.parquet and test.parquet}"
export MODEL_PATH DATA_DIR

exec "${PYTHON:-python3}" -m verl_omni.trainer.main_diffusion qwen_image_aesthetic_lora_draft "$@"
