"""Tokenizers and text encoders with random weights, for tiny checkpoints. Text is spelled letter by letter."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import CLIPTextModel, CLIPTokenizer, PreTrainedModel, T5Tokenizer


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
