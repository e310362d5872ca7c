"""Does a sound say the wanted text? Listen with Whisper (arXiv 2212.04356) and compare."""

import unicodedata
from typing import Any

import numpy as np

from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.scorers.ocr import edit_distance
from verl_omni.rewards.sounds import mono, resampled, windows
from verl_omni.rewards.torch_models import BatchSize, Dtype, SoundScorer, load_model, load_pretrained

LEAST_SECONDS = 0.1  # of the end of a long sound: no word is as short, and Whisper writes some of anything


def letters_of(text: str) -> str:
    """What is compared: letters with their marks and digits, all of them small, one way to write each."""
    small = unicodedata.normalize("NFKC", text).lower()
    return "".join(letter for letter in small if unicodedata.category(letter)[0] in "LMN")


def share_right(said: str, wanted: str) -> float:
    """1 - character error rate, at least 0."""
    wanted = letters_of(wanted)
    return max(0.0, 1 - edit_distance(letters_of(said), wanted) / len(wanted))


@register_reward("asr_text", reads=("ground_truth",))
class AsrText(SoundScorer):
    """Does the sound say the ground truth? Score = 1 - character error rate, at least 0.

    Only letters and digits count, upper and lower case are the same. Whisper listens to 30 s at a time (an end below
    0.1 s is left out), and takes the likeliest word each time. Without a ``language`` it says itself which one it
    hears. Answers with ``asr_text`` too.
    """

    needs_prompts = False

    def __init__(
        self,
        *,
        model: str = "openai/whisper-small",
        language: str | None = "en",
        device: str | None = None,
        dtype: Dtype = "float32",
        batch_size: BatchSize = 8,
    ):
        from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

        super().__init__("asr_text", device, dtype, batch_size)
        self.model = load_model(WhisperForConditionalGeneration, model, self.name, self.dtype).to(self.device)
        self.tokenizer = load_pretrained(AutoTokenizer, model, self.name)
        self.extractor = load_pretrained(WhisperFeatureExtractor, model, self.name)
        self.choices = {"do_sample": False, "num_beams": 1}
        if getattr(self.model.generation_config, "is_multilingual", False) and language is not None:
            self.choices |= {"language": language, "task": "transcribe"}

    def parts(self, audio: Any, sample_rate: int) -> list[np.ndarray]:
        wave = resampled(mono(audio, sample_rate), sample_rate, self.extractor.sampling_rate)
        parts = windows(wave, self.extractor.n_samples)
        if len(parts) > 1 and len(parts[-1]) < LEAST_SECONDS * self.extractor.sampling_rate:
            parts.pop()
        return parts

    def hear(self, parts: list[np.ndarray]) -> list[str]:
        """Each is padded to the full length: what is heard does not depend on the others."""
        features = self.extractor(parts, sampling_rate=self.extractor.sampling_rate, return_tensors="pt")
        ids = self.model.generate(features["input_features"].to(self.device, self.dtype), **self.choices)
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def __call__(
        self,
        audios: list,
        sample_rates: list[int],
        ground_truths: list[str],
        prompts: list[str] | None = None,
        extra_infos: list[dict] | None = None,
    ) -> list[dict[str, Any]]:
        for index, truth in enumerate(ground_truths):
            if not isinstance(truth, str) or not letters_of(truth):
                raise ValueError(
                    f'the reward "asr_text" needs the words to hear as ground truth, and those of sound {index} are '
                    f"{truth!r}"
                )
        sounds = [self.parts(*sound) for sound in zip(audios, sample_rates, strict=True)]
        heard = iter(self.batched([part for parts in sounds for part in parts], self.hear))
        answers = []
        for parts, truth in zip(sounds, ground_truths, strict=True):
            said = " ".join(next(heard).strip() for _ in parts).strip()
            answers.append({"score": share_right(said, truth), "asr_text": said})
        return answers
