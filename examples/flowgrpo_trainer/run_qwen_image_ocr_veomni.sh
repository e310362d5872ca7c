#!/usr/bin/env bash
# Flow-GRPO on Qwen-Image, all weights, with the OCR reward, trained by VeOmni.
#
#   MODEL_PATH=/models/Qwen-Image DATA_DIR=data/ocr bash examples/flowgrpo_trainer/run_qwen_image_ocr_veomni.sh [key=value ...]
#
# The recipe is `verl-omni recipes show qwen_image_ocr` with another engine; what you add here overrides it. NUM_GPUS is 8
# unless set. Make the data with examples/flowgrpo_trainer/data_process/qwenimage_ocr.py. VeOmni has to be installed:
# docs/veomni.md.
set -euo pipefail
: "${MODEL_PATH:?set MODEL_PATH to the diffusers folder of Qwen-Image}"
: "${DATA_DIR:?set DATA_DIR to the folder with train.parquet and test.parquet}"
export MODEL_PATH DATA_DIR

exec "${PYTHON:-python3}" -m verl_omni.trainer.main_diffusion qwen_image_ocr \
    diffusion/model_engine=veomni_diffusion \
    trainer.experiment_name=qwen_image_ocr_veomni "$@"
