"""Which image would people prefer for the prompt? HPS v3 (arXiv 2508.03789), from its published checkpoint."""

import ast
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from verl_omni.rewards.published_weights import build_model, check_names, find_file, read_tensors, shape_of
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.torch_models import BatchSize, Dtype, Frames, ModelScorer, load_pretrained
from verl_omni.utils.errors import RunError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

REWARD_TOKEN, IMAGE_TOKEN = "<|Reward|>", "<|image_pad|>"
# Qwen2-VL's own chat, with its default system prompt.
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{image}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
)
# Every image is brought to about this size, small ones too.
PIXELS = 256 * 28 * 28
HEAD = "rm_head."


def checkpoint_name(name: str) -> str:
    """Where the checkpoint has a parameter of Qwen2VLModel: by the names of transformers 4.45."""
    return name.replace("language_model.", "model.", 1)


def read_instruction(path: str | None) -> str:
    """What HPS v3 was trained to be asked, with `{text_prompt}` in it, out of its own source, which is not run."""
    if path is None:
        package = importlib.util.find_spec("hpsv3")
        path = str(Path(package.origin).parent / "dataset/data_collator_qwen.py") if package else ""
    if not Path(path).is_file():
        raise RunError(
            'the reward "hpsv3" needs the words that HPS v3 was trained with: pip install --no-deps hpsv3, or set '
            "reward.scorers.hpsv3.instruction to the file data_collator_qwen.py of github.com/MizzenAI/HPSv3"
        )
    texts = {}
    for line in ast.parse(Path(path).read_text()).body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant):
            texts |= {target.id: line.value.value for target in line.targets if isinstance(target, ast.Name)}
    instruction = f"{texts.get('INSTRUCTION', '')}{texts.get('prompt_with_special_token', '')}"
    if instruction.count("{text_prompt}") != 1 or instruction.count(REWARD_TOKEN) != 1:
        raise RunError(
            f'reward.scorers.hpsv3.instruction: "{path}" does not have the texts INSTRUCTION, with {{text_prompt}}, '
            f"and prompt_with_special_token, with {REWARD_TOKEN}"
        )
    return instruction


@register_reward("hpsv3", reads=("prompt",))
class HpsV3(ModelScorer):
    """The mean of people's preference as Qwen2-VL-7B with a head of its own puts it: about 0 to 15.

    ``model`` is a file, or one on the hub; it holds all weights. ``base`` is where config and tokenizer come from.
    ``instruction`` is the source file of HPS v3 with the words that it was trained on, by default that of the
    installed package. Answers with ``score`` and ``sigma``, how unsure the model is.
    """

    def __init__(
        self,
        *,
        model: str = "MizzenAI/HPSv3/HPSv3.safetensors",
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        instruction: str | None = None,
        device: str | None = None,
        dtype: Dtype = "bfloat16",
        batch_size: BatchSize = 4,
        frames: Frames = None,
    ):
        from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLImageProcessorPil, Qwen2VLModel

        super().__init__("hpsv3", device, dtype, batch_size, frames)
        self.instruction = read_instruction(instruction)
        where, file = f'reward.scorers.hpsv3.model="{model}"', find_file(model, self.name)
        config = load_pretrained(Qwen2VLConfig, base, self.name, "base")
        self.tokenizer = load_pretrained(AutoTokenizer, base, self.name, "base")
        self.tokenizer.add_tokens([REWARD_TOKEN], special_tokens=True)
        self.reward_id = self.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)

        weights = read_tensors(file, self.name)
        weights.pop("lm_head.weight", None)  # for writing text, which scoring does not
        words = shape_of(weights, "model.embed_tokens.weight", where)[0]
        if words != self.reward_id + 1:
            raise RunError(
                f'{where} has {words} tokens, and base="{base}" {self.reward_id} without {REWARD_TOKEN}, which has '
                "to be the last: the published model is of Qwen/Qwen2-VL-7B-Instruct"
            )
        config.text_config.vocab_size = words
        self.head = make_head({key: weights.pop(key) for key in list(weights) if key.startswith(HEAD)}, where)
        self.head.to(self.device)
        self.model = build_model(Qwen2VLModel, config, weights, checkpoint_name, where, self.dtype).to(self.device)
        vision = config.vision_config
        self.merged = vision.spatial_merge_size**2
        self.image_processor = Qwen2VLImageProcessorPil(
            # min_pixels and max_pixels would change the size of every processor in this process (transformers 5).
            size={"shortest_edge": PIXELS, "longest_edge": PIXELS},
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
        )

    def score(self, pictures: list["Image"], prompts: list[str]) -> dict[str, "torch.Tensor"]:
        import torch

        images = self.image_processor(images=pictures, return_tensors="pt").to(self.device)
        counts = (images["image_grid_thw"].prod(-1) // self.merged).tolist()
        tokens = self.tokenizer(
            [self._chat(prompt, count) for prompt, count in zip(prompts, counts, strict=True)],
            padding=True,
            padding_side="right",
            return_tensors="pt",
        ).to(self.device)
        ids = tokens["input_ids"]
        # HPS v3 was trained with positions that count through image and text, not with Qwen2-VL's rows and columns.
        positions = torch.arange(ids.shape[1], device=self.device).expand(3, *ids.shape)
        hidden = self.model(
            input_ids=ids,
            attention_mask=tokens["attention_mask"],
            position_ids=positions,
            pixel_values=images["pixel_values"].to(self.dtype),
            image_grid_thw=images["image_grid_thw"],
            use_cache=False,
        ).last_hidden_state
        mean, log_sigma = self.head(hidden[ids == self.reward_id].float()).unbind(-1)
        return {"score": mean, "sigma": log_sigma.exp()}

    def _chat(self, prompt: str, image_tokens: int) -> str:
        if REWARD_TOKEN in prompt or IMAGE_TOKEN in prompt:
            raise ValueError(f'the reward "hpsv3" cannot score a prompt with its tokens in it: {prompt!r}')
        return CHAT.format(image=IMAGE_TOKEN * image_tokens, text=self.instruction.format(text_prompt=prompt))


def make_head(weights: dict[str, "torch.Tensor"], where: str) -> "torch.nn.Sequential":
    """From what is at the reward token to mean and log deviation, in float32; number 2 was dropout."""
    from torch import nn

    check_names([f"{HEAD}{number}.{kind}" for number in (0, 3, 5) for kind in ("weight", "bias")], weights, where)
    first, second, last = (nn.Linear(*reversed(weights[f"{HEAD}{n}.weight"].shape)) for n in (0, 3, 5))
    head = nn.Sequential(first, nn.ReLU(), nn.Identity(), second, nn.ReLU(), last)
    head.load_state_dict({key.removeprefix(HEAD): value for key, value in weights.items()})
    return head.eval()
