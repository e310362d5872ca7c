"""HPS v3 from a checkpoint with its published names, against Qwen2-VL's own classes and the head in numpy."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_scorers import CLIP_MEAN, CLIP_STD, PROMPTS, pictures, randomise
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLModel

from verl_omni.rewards import make_scorer
from verl_omni.rewards.published_weights import check_names
from verl_omni.rewards.scorers.hpsv3 import checkpoint_name, read_instruction
from verl_omni.utils.errors import RunError

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SOURCE = '''
import a_package_that_nobody_has
INSTRUCTION = """
How good is it? {text_prompt}
"""
prompt_with_special_token = """
Say: <|Reward|>
END
"""
class Collator: ...
'''


def published_names(state: dict) -> dict:
    """Before transformers 4.52 the parts of Qwen2-VL lay side by side."""
    return {
        key.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
        for key, value in state.items()
    }


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Folder with checkpoint, base and source file; the model that they are of, its head and its tokenizer."""
    folder = tmp_path_factory.mktemp("hpsv3")
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(TOKENS)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=TOKENS[0], eos_token=TOKENS[2])
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 14, "mlp_ratio": 2}
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": ids("<|im_end|>"),
    }
    special = {"image_token_id": ids("<|image_pad|>"), "vision_start_token_id": ids("<|vision_start|>")}
    # The base has room for more words than its tokenizer has, and the published model has one more than that.
    Qwen2VLConfig(text_config=text | {"vocab_size": 300}, vision_config=vision, **special).save_pretrained(folder)
    config = Qwen2VLConfig(text_config=text | {"vocab_size": len(tokenizer) + 1}, vision_config=vision, **special)
    model = randomise(Qwen2VLForConditionalGeneration(config))
    head = randomise(torch.nn.Sequential(
        torch.nn.Linear(32, 1024), torch.nn.ReLU(), torch.nn.Dropout(0.05),
        torch.nn.Linear(1024, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2),
    ))  # fmt: skip
    weights = published_names(model.state_dict()) | {f"rm_head.{key}": v for key, v in head.state_dict().items()}
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / "HPSv3.safetensors")
    (folder / "data_collator_qwen.py").write_text(SOURCE)
    return folder, weights, model, head, tokenizer


def make(folder, **settings):
    given = {"model": f"{folder}/HPSv3.safetensors", "base": str(folder), "dtype": "float32"}
    return make_scorer("hpsv3", given | {"instruction": f"{folder}/data_collator_qwen.py"} | settings)


def square_patches(image: Image.Image) -> np.ndarray:
    """Qwen2-VL's patches of a square image at 448 x 448: blocks of 2 x 2, each patch twice, as two frames."""
    pixels = np.array(image.resize((448, 448), Image.Resampling.BICUBIC), np.float64) / 255
    grid = ((pixels - CLIP_MEAN) / CLIP_STD).reshape(16, 2, 14, 16, 2, 14, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return np.repeat(grid.reshape(1024, 3, 1, 14, 14), 2, axis=2).reshape(1024, -1)


def expected(published, image: Image.Image, prompt: str) -> tuple[float, float]:
    """Mean and sigma: what the text model has at the reward token, positions counting up, then the head."""
    _, _, model, head, tokenizer = published
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
        + "<|image_pad|>" * 256
        + f"<|vision_end|>\nHow good is it? {prompt}\n\nSay: "
    )
    reward = len(tokenizer)
    ids = torch.tensor([[*tokenizer(text)["input_ids"], reward]])  # what follows cannot be seen from there
    with torch.no_grad():
        inner = model.model
        embedded = inner.get_input_embeddings()(ids)
        patches = torch.from_numpy(square_patches(image)).float()
        seen = inner.visual(patches, grid_thw=torch.tensor([[1, 32, 32]])).pooler_output
        embedded[ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")] = seen
        x = inner.language_model(inputs_embeds=embedded).last_hidden_state[0, -1].double().numpy()
    for number in (0, 3, 5):
        x = head[number].weight.detach().double().numpy() @ x + head[number].bias.detach().double().numpy()
        x = x if number == 5 else np.maximum(x, 0)
    return x[0], np.exp(x[1])


def test_score_is_the_mean_at_the_reward_token(published):
    images = pictures((60, 60), (448, 448), (900, 900))
    scorer = make(published[0])
    answers = scorer(images, None, PROMPTS, None)
    wanted = [expected(published, *pair) for pair in zip(images, PROMPTS, strict=True)]
    assert [a["score"] for a in answers] == pytest.approx([mean for mean, _ in wanted], rel=1e-3, abs=1e-3)
    assert [a["sigma"] for a in answers] == pytest.approx([sigma for _, sigma in wanted], rel=1e-3)
    assert np.std([mean for mean, _ in wanted]) > 0.01
    alone = [scorer([i], None, [p], None)[0]["score"] for i, p in zip(images, PROMPTS, strict=True)]
    assert [a["score"] for a in answers] == pytest.approx(alone, rel=1e-4, abs=1e-4)


def test_every_name_of_the_real_model_has_its_place():
    """Qwen2-VL-7B: 28 and 32 layers, without their weight."""
    config = Qwen2VLConfig(
        text_config={"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                     "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151658},
        vision_config={"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16},
    )  # fmt: skip
    wanted = ["model.embed_tokens.weight", "model.norm.weight", "visual.patch_embed.proj.weight"]
    wanted += [f"visual.merger.{part}.{kind}" for part in ("ln_q", "mlp.0", "mlp.2") for kind in ("weight", "bias")]
    for number in range(28):
        layer = f"model.layers.{number}."
        wanted += [f"{layer}{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")]
        wanted += [f"{layer}self_attn.{n}_proj.{kind}" for n in "qkv" for kind in ("weight", "bias")]
        wanted += [f"{layer}{name}_proj.weight" for name in ("self_attn.o", "mlp.gate", "mlp.up", "mlp.down")]
    for number in range(32):
        parts = ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        wanted += [f"visual.blocks.{number}.{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    with torch.device("meta"):
        state = Qwen2VLModel(config).state_dict()
    check_names(wanted, [checkpoint_name(name) for name in state], "there")


def test_another_checkpoint_is_refused(published, tmp_path):
    folder, weights, *_ = published
    for gone, new, told in (
        ("model.layers.1.mlp.up_proj.weight", {}, "it lacks model.layers.1.mlp.up_proj.weight"),
        ("rm_head.3.bias", {}, "it lacks rm_head.3.bias"),
        (None, {"cond.weight": torch.ones(1)}, "it has cond.weight"),
        (None, {"model.embed_tokens.weight": torch.ones(300, 32)}, "has 300 tokens, and base=.* 262 without"),
    ):
        changed = {key: value.contiguous() for key, value in weights.items() if key != gone} | new
        save_file(changed, tmp_path / "changed.safetensors")
        with pytest.raises(RunError, match=told):
            make(folder, model=str(tmp_path / "changed.safetensors"))


def test_what_is_missing_is_told_in_one_line(published, tmp_path, monkeypatch):
    folder = published[0]
    for settings, told in (
        ({"model": "nobody/nothing/HPSv3.safetensors"}, "set reward.scorers.hpsv3.model to the file"),
        ({"base": "nobody/nothing"}, "set reward.scorers.hpsv3.base to the folder"),
        ({"instruction": "/no/such.py"}, "pip install --no-deps hpsv3, or set reward.scorers.hpsv3.instruction"),
    ):
        with pytest.raises(RunError, match=told) as error:
            make(folder, **settings)
        assert "\n" not in str(error.value)
    (tmp_path / "other.py").write_text("INSTRUCTION = 'how?'\n")
    with pytest.raises(RunError, match="does not have the texts INSTRUCTION"):
        make(folder, instruction=str(tmp_path / "other.py"))


def test_the_instruction_comes_from_the_installed_package(tmp_path, monkeypatch):
    place = tmp_path / "hpsv3"
    (place / "dataset").mkdir(parents=True)
    (place / "__init__.py").write_text("raise RuntimeError('never imported')")
    (place / "dataset/data_collator_qwen.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    assert read_instruction(None) == "\nHow good is it? {text_prompt}\n\nSay: <|Reward|>\nEND\n"


def test_a_prompt_cannot_hold_tokens_of_the_model(published):
    scorer = make(published[0])
    with pytest.raises(ValueError, match="its tokens in it"):
        scorer(pictures((30, 30)), None, ["a <|Reward|>"], None)
    assert np.isfinite(scorer(pictures((30, 30)), None, ["{braces} and {0}"], None)[0]["score"])
