"""What is particular to ACE-Step: what is sung, a duration that the text tells, and guidance that cannot be trained."""

import pytest
import test_architectures as architectures
import torch

from verl_omni.pipelines.ace_step import AceStep

ROW = next(row for row in architectures.TABLE if row.name == "AceStepPipeline")


def test_what_comes_after_lyrics_is_sung():
    model_config = architectures.config(ROW, cfg=False)
    sung = [f"{architectures.PROMPTS[0]}<lyrics>la"]
    (output,) = architectures.generate(ROW, architectures.rollout(model_config), sung)
    expected, _ = architectures.draw(architectures.upstream(ROW.name), ROW, 0, cfg=False, of={"lyrics": "la"})
    torch.testing.assert_close(output.trajectory["final_latents"][None], expected, atol=1e-5, rtol=1e-5)


def test_one_engine_draws_several_durations():
    """The duration is among the words that are encoded, and a prompt is encoded once for each."""
    engine = architectures.rollout(architectures.config(ROW, cfg=False))
    ids = AceStep.tokenize(AceStep.load_tokenizers(engine.model_config), "a cat", architectures.SEQUENCE)
    for seconds in (2.0, 13.0, 2.0):
        asked = engine._requested({"audio_duration_s": seconds})
        features = engine._encode(ids, None, (), asked)
        text, *_ = engine.pipe.encode_prompt("a cat", "", torch.device("cpu"), audio_duration=seconds)
        projected = engine.pipe.condition_encoder.text_projector(text)
        torch.testing.assert_close(features["prompt_embeds"][:, -text.shape[1] :], projected, atol=1e-5, rtol=0)
        assert features["silence"].shape[1] == 10 * seconds


def test_guidance_with_a_momentum_is_refused(monkeypatch):
    model_config = architectures.config(ROW, cfg=False)
    AceStep.check(model_config)
    monkeypatch.setattr(AceStep, "_is_turbo", classmethod(lambda cls, config: False))
    with pytest.raises(ValueError, match="has a momentum over steps, .* set guidance_scale=1, or train a turbo model"):
        AceStep.check(model_config)
    model_config.pipeline.guidance_scale = 1.0
    AceStep.check(model_config)
