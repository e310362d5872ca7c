"""Does a sound match what the prompt says, for CLAP (arXiv 2211.06687)?"""

from typing import TYPE_CHECKING, Any

import numpy as np

from verl_omni.rewards.image_text import unit
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.sounds import full_windows, mono, resampled
from verl_omni.rewards.torch_models import BatchSize, Dtype, SoundScorer, load_model, load_pretrained
from verl_omni.utils.errors import RunError

if TYPE_CHECKING:
    import torch


@register_reward("clap_score", reads=("prompt",))
class ClapScore(SoundScorer):
    """The cosine of the sound's and the prompt's embedding.

    Of a sound that is longer than the model takes (10 s, for published ones) it is the mean over parts as long as
    that, the last of which ends with the sound.
    """

    def __init__(
        self,
        *,
        model: str = "laion/clap-htsat-unfused",
        device: str | None = None,
        dtype: Dtype = "float32",
        batch_size: BatchSize = 8,
    ):
        from transformers import AutoTokenizer, ClapFeatureExtractor, ClapModel

        super().__init__("clap_score", device, dtype, batch_size)
        self.model = load_model(ClapModel, model, self.name, self.dtype).to(self.device)
        if self.model.config.audio_config.enable_fusion:
            raise RunError(
                f'reward.scorers.clap_score.model="{model}" joins parts of a long sound that it draws at random: take '
                "an unfused one, such as laion/clap-htsat-unfused"
            )
        self.tokenizer = load_pretrained(AutoTokenizer, model, self.name)
        self.extractor = load_pretrained(ClapFeatureExtractor, model, self.name)

    def parts(self, audio: Any, sample_rate: int) -> list[np.ndarray]:
        wave = resampled(mono(audio, sample_rate), sample_rate, self.extractor.sampling_rate)
        return full_windows(wave, self.extractor.nb_max_samples)

    def score(self, parts: list[np.ndarray], prompts: list[str]) -> dict[str, "torch.Tensor"]:
        features = self.extractor(
            parts, sampling_rate=self.extractor.sampling_rate, truncation="rand_trunc", return_tensors="pt"
        )["input_features"]
        heard = self.model.get_audio_features(features.to(self.device, self.dtype)).pooler_output
        texts = list(dict.fromkeys(prompts))
        said = self.tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
        read = self.model.get_text_features(
            said["input_ids"].to(self.device), attention_mask=said["attention_mask"].to(self.device)
        ).pooler_output
        read = unit(read)[[texts.index(prompt) for prompt in prompts]]
        return {"score": (unit(heard) * read).sum(-1)}
