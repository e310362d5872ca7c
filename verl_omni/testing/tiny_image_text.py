"""Tiny models of images and text, with random weights, of each kind that may write."""

from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerBase

VISION = {
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
    "qwen2_5_vl": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
        "fullatt_block_indexes": [0],
    },
    "qwen3_vl": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    },
}  # fmt: skip
VISION["qwen2_5_omni_thinker"] = VISION["qwen2_5_vl"]
AUDIO = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 8,
    "output_dim": 32, "n_window": 8, "max_source_positions": 64,
}  # fmt: skip


def image_text_model(kind: str, tokenizer: PreTrainedTokenizerBase, layers: int = 2) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
        "rope_parameters": rope, "initializer_range": 0.2, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None,
    }  # fmt: skip
    if kind != "qwen3_vl":
        del text["head_dim"]
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start")}
    told = {"image_token_id": ids["image_pad"], "video_token_id": ids["video_pad"]}
    told["vision_start_token_id"] = ids["vision_start"]
    hears = {"audio_config": AUDIO} if "omni" in kind else {}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=VISION[kind], **told, **hears)
    return AutoModelForImageTextToText.from_config(config).eval()
