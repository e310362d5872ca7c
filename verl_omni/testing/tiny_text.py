"""Tokenizers, and text encoders with random weights, for tiny checkpoints."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import (
        CLIPTextModel,
        CLIPTokenizer,
        Gemma3ForConditionalGeneration,
        GemmaTokenizer,
        GlmImageForConditionalGeneration,
        Mistral3ForConditionalGeneration,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        Qwen2_5_VLForConditionalGeneration,
        T5Tokenizer,
    )

QWEN_SPECIAL_TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]

# ChatML with the system message that Qwen2.5-VL's tokenizer puts in where a conversation has none.
CHATML_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Qwen3's: no system message of its own, and an empty thought where thinking is off.
QWEN3_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

# For messages whose contents are lists of parts.
MISTRAL_TEMPLATE = (
    "{% for message in messages %}[INST]{{ message['role'] }} {% for part in message['content'] %}"
    "{{ part['text'] }}{% endfor %}{% endfor %}"
)

# For messages whose contents are lists of texts and images.
GLM_IMAGE_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def clip_tokenizer() -> "CLIPTokenizer":
    """One token a byte; as CLIP's own, the last byte of a word is another token than the same byte inside it."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=77)


def clip_text_encoder(tokenizer: "CLIPTokenizer", cls: type["CLIPTextModel"], hidden_size: int = 16) -> "CLIPTextModel":
    """A two-layer CLIP text model of class ``cls`` (with or without projection)."""
    from transformers import CLIPTextConfig

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        projection_dim=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # Wide enough that attention tells tokens apart.
        initializer_factor=2.0,
    )
    return cls(config).eval()


def t5_tokenizer() -> "T5Tokenizer":
    """One token a printable ASCII character and a few more; what is not among them is the unknown token."""
    from transformers import T5Tokenizer

    letters = [chr(code) for code in range(33, 127)] + list("äöüßéè日本語")
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5Tokenizer(vocab=[*special, *((letter, -3.0) for letter in letters)], extra_ids=0)


def t5_encoder(tokenizer: "T5Tokenizer", name: str = "T5", hidden_size: int = 32) -> "PreTrainedModel":
    """A two-layer T5 encoder, or its multilingual relative with ``name="UMT5"``."""
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(tokenizer),
        d_model=hidden_size,
        d_kv=hidden_size // 4,
        d_ff=2 * hidden_size,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return getattr(transformers, f"{name}EncoderModel")(config).eval()


def qwen_tokenizer(known_texts: Iterable[str]) -> "PreTrainedTokenizerBase":
    """A Qwen2 tokenizer to which every word of ``known_texts`` is one token; all else is spelled in bytes or pieces.

    Training byte-pair encoding on nothing but these texts, until there is no pair left to merge, gives just that.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        known_texts,
        vocab_size=100_000,
        new_special_tokens=QWEN_SPECIAL_TOKENS,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.chat_template = CHATML_TEMPLATE
    return tokenizer


def qwen_text_encoder(
    tokenizer: "PreTrainedTokenizerBase", hidden_size: int = 32, layers: int = 2
) -> "Qwen2_5_VLForConditionalGeneration":
    """A Qwen2.5-VL with four heads, random weights, and the vocabulary of ``tokenizer``."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    half_head = hidden_size // 8
    text_config = dict(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [half_head // 4, half_head // 4, half_head - 2 * (half_head // 4)],
        },
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        # Wide enough that attention tells tokens apart: with the usual 0.02 a token's neighbours hardly matter.
        initializer_range=0.2,
    )
    vision_config = dict(
        depth=1,
        hidden_size=16,
        intermediate_size=32,
        num_heads=2,
        out_hidden_size=hidden_size,
        fullatt_block_indexes=[0],
    )
    token_id = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def qwen3_tokenizer() -> "PreTrainedTokenizerBase":
    """The same with Qwen3's chat template, which shows in its text whether thinking is enabled."""
    tokenizer = qwen_tokenizer(["user assistant think\n"])
    tokenizer.chat_template = QWEN3_TEMPLATE
    return tokenizer


def qwen3_text_encoder(
    tokenizer: "PreTrainedTokenizerBase", cls: type["PreTrainedModel"], hidden_size: int = 32, layers: int = 3
) -> "PreTrainedModel":
    """A Qwen3 of class ``cls``, with or without its language head."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    return cls(config).eval()


def mistral_tokenizer(known_texts: Iterable[str]) -> "PreTrainedTokenizerBase":
    """A tokenizer for conversations whose messages are lists of parts. Every word of ``known_texts`` is one token."""
    tokenizer = qwen_tokenizer(known_texts)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[INST]", "[IMG]"]})
    tokenizer.chat_template = MISTRAL_TEMPLATE
    return tokenizer


def mistral_text_encoder(
    tokenizer: "PreTrainedTokenizerBase", hidden_size: int, layers: int
) -> "Mistral3ForConditionalGeneration":
    """A Mistral 3 with ``layers`` text layers, of which FLUX.2 reads some in the middle."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text_config = dict(
        model_type="mistral",
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    vision_config = dict(
        model_type="pixtral",
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=8,
        image_size=64,
    )
    config = Mistral3Config(
        text_config=text_config,
        vision_config=vision_config,
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
    )
    return Mistral3ForConditionalGeneration(config).eval()


def gemma_tokenizer() -> "GemmaTokenizer":
    """One token a printable ASCII character; what is not among them is the unknown token."""
    from transformers import GemmaTokenizer

    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *(chr(code) for code in range(33, 127))]
    return GemmaTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[])


def gemma_text_encoder(
    tokenizer: "GemmaTokenizer", hidden_size: int, layers: int
) -> "Gemma3ForConditionalGeneration":
    """A Gemma 3 with ``layers`` text layers, all of which LTX-2 reads."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text_config = dict(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    vision_config = dict(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(text_config=text_config, vision_config=vision_config, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config).eval()


def glm_image_tokenizer(codes: int) -> "PreTrainedTokenizerBase":
    """Its first tokens are those of images, then begin and end of one, then one a byte."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    special = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    images = [f"<|dit_token_{i}|>" for i in range(codes + 2)]
    words = [*images, *sorted(ByteLevel.alphabet()), "<|pad|>", *special.values()]
    spelled = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    spelled.pre_tokenizer, spelled.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=spelled,
        bos_token=images[codes],
        eos_token=images[codes + 1],
        pad_token="<|pad|>",
        padding_side="left",
        extra_special_tokens=special,
    )


def glm_image_language_model(tokenizer: "PreTrainedTokenizerBase", codes: int) -> "GlmImageForConditionalGeneration":
    """One layer. It writes tokens of images alone, always the likeliest one."""
    from transformers import GenerationConfig, GlmImageConfig, GlmImageForConditionalGeneration

    config = GlmImageConfig(
        text_config=dict(
            vocab_size=len(tokenizer),
            vision_vocab_size=codes,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            initializer_range=0.2,
        ),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, image_size=64),
        vq_config=dict(embed_dim=8, num_embeddings=codes, latent_channels=16),
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        image_start_token_id=tokenizer.bos_token_id,
        image_end_token_id=tokenizer.eos_token_id,
    )
    model = GlmImageForConditionalGeneration(config).eval()
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=1, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def language_model(tokenizer: "PreTrainedTokenizerBase", hidden_size: int = 32, layers: int = 2) -> "PreTrainedModel":
    """A Qwen2 with its language head, random weights, and the vocabulary of ``tokenizer``."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config).eval()
