#!/usr/bin/env bash
# On-policy distillation on the forward process, on Qwen-Image with LoRA and the OCR reward.
#
#   MODEL_PATH=/models/Qwen-Image DATA_DIR=data/ocr TEACHER=outputs/run/global_step_300/export bash examples/opd_trainer/run_qwen_image_ocr_lora_opd_forward.sh [key=value ...]
#
# The recipe is `verl-omni recipes show qwen_image_ocr_lora_opd_forward`; what you add here overrides it. NUM_GPUS is 8
# unless set. Make the data with examples/flowgrpo_trainer/data_process/qwenimage_ocr.py.
set -euo pipefail
: "${MODEL_PATH:?set MODEL_PATH to the diffusers folder of Qwen-Image}"
: "${DATA_DIR:?set DATA_DIR to the folder with train.parquet and test.parquet}"
: "${TEACHER:?set TEACHER to the folder of the teacher's LoRA, such as global_step_N/export of a run}"
export MODEL_PATH DATA_DIR TEACHER

exec "${PYTHON:-python3}" -m verl_omni.trainer.main_diffusion qwen_image_ocr_lora_opd_forward "$@"
