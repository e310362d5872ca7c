"""A tiny vision-language model of random weights that says one digit from 1 to 5, for `transformers serve`."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

CHAT = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{% endfor %}"
)


def write(folder: Path) -> None:
    special = ["<pad>", "<s>", "</s>", "<image>"]
    vocabulary = {t: i for i, t in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=["<image>"],
    )  # fmt: skip
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen = CLIPVisionConfig(**small, image_size=16, patch_size=8, projection_dim=16)
    said = LlamaConfig(**small, vocab_size=len(vocabulary), max_position_embeddings=2048, initializer_range=1.0)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=seen, text_config=said, image_token_id=3))
    with torch.no_grad():  # so that the answer depends on the image
        for layer in (model.model.multi_modal_projector.linear_1, model.model.multi_modal_projector.linear_2):
            layer.weight.mul_(50)
    # All but digits is forbidden, and a digit ends the answer.
    digits = [vocabulary[digit] for digit in "12345"]
    others = [token for token in vocabulary.values() if token not in digits]
    model.generation_config = GenerationConfig(suppress_tokens=others, eos_token_id=digits, pad_token_id=0)
    model.save_pretrained(folder)
    LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer, patch_size=8, vision_feature_select_strategy="default", chat_template=CHAT,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip


def digits_of(folder: Path, images: list, questions: list[str]) -> list[int]:
    """What the model says of each image, asked by transformers itself."""
    model = LlavaForConditionalGeneration.from_pretrained(folder)
    processor = LlavaProcessor.from_pretrained(folder)
    found = []
    for image, question in zip(images, questions, strict=True):
        inputs = processor(images=image, text=f"<image>{question}", return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=8)
        found.append(int(processor.decode(output[0, inputs["input_ids"].shape[1] :])))
    return found
