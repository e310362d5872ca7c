"""Rewards of sounds: closed formulas written out, and models' own output on tiny random weights."""

import math

import numpy as np
import pytest
import torch
from tiny_scorers import randomise
from transformers import (
    ClapConfig,
    ClapFeatureExtractor,
    ClapModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from verl_omni.rewards import make_scorer
from verl_omni.rewards.registry import check_settings
from verl_omni.rewards.scorers.asr_text import share_right
from verl_omni.rewards.sounds import full_windows, resampled
from verl_omni.testing.tiny_text import t5_tokenizer
from verl_omni.utils.errors import RunError

RATE = 8000


def sine(frequency: float, amplitude: float = 1.0, seconds: float = 1.0, rate: int = RATE, channels: int = 1):
    time = torch.arange(round(seconds * rate), dtype=torch.float64) / rate
    return amplitude * torch.sin(2 * math.pi * frequency * time).expand(channels, -1)


def test_a_tone_stays_itself_at_another_rate():
    for wanted in (16000, 6000, 48000):
        found = resampled(sine(440.0).double()[0].numpy(), RATE, wanted)
        np.testing.assert_allclose(found, sine(440.0, rate=wanted).double()[0].numpy(), atol=1e-4)
    high = resampled(sine(3900.0)[0].numpy(), RATE, 4000)  # above what the lower rate can hold
    assert np.abs(high).max() < 1e-3


def test_loudness_is_the_root_mean_square_in_decibels():
    tones = [sine(440.0), sine(440.0, 0.1), torch.zeros(2, 100), torch.ones(1, 50)]
    answers = make_scorer("loudness", {"target": -20.0, "width": 10.0})(tones, [RATE] * 4)
    level = 10 * math.log10(0.5)  # of a sine
    assert [a["decibels"] for a in answers] == pytest.approx([level, level - 20, -120, 0.0], abs=1e-6)
    assert [a["score"] for a in answers] == pytest.approx([0, 1 - (-level) / 10, 0, 0], abs=1e-6)
    opposite = torch.cat([sine(440.0), -sine(440.0)])  # their mean is silent
    (answer,) = make_scorer("loudness")([opposite], [RATE])
    assert answer["decibels"] == pytest.approx(level, abs=1e-6)
    (answer,) = make_scorer("silence")([opposite], [RATE])
    assert answer["silent_share"] == 0


def test_silence_counts_time_and_knows_that_of_a_computer():
    sound = torch.cat([torch.ones(1, 160), torch.zeros(1, 40)], dim=1)  # the second window is shorter
    (answer,) = make_scorer("silence", {"below": -120.0})([sound], [RATE])
    assert answer["silent_share"] == 0.2


def test_parts_of_a_sound_are_of_full_length():
    starts = {1: [0], 99: [0], 100: [0], 101: [0, 1], 200: [0, 100], 250: [0, 100, 150]}
    for length, expected in starts.items():
        parts = full_windows(np.arange(length), 100)
        assert [part[0] for part in parts] == expected and parts[-1][-1] == length - 1
        assert all(len(part) == min(length, 100) for part in parts)


def test_silence_is_the_share_of_windows_below():
    half = torch.cat([sine(440.0, 0.5), torch.zeros(1, RATE)], dim=1)
    quiet = sine(440.0, 10 ** (-60 / 20) * math.sqrt(2))  # -60 dB
    for below, expected in ((-50.0, [0.5, 0.0]), (-70.0, [0.5, 1.0])):
        answers = make_scorer("silence", {"below": below})([half, quiet], [RATE] * 2)
        assert [a["score"] for a in answers] == expected
        assert [a["silent_share"] for a in answers] == [1 - share for share in expected]


def blinking(frames: int, at: int) -> torch.Tensor:
    """A video in which one frame is bright."""
    video = torch.zeros(frames, 3, 4, 4)
    video[at] = 1.0
    return video


def test_sound_that_begins_where_something_moves():
    """Correlation written out by numpy's own, and three cases that need no formula."""
    video, rate = blinking(8, 3), 10.0
    clap = torch.zeros(1, 8 * RATE // 10)
    clap[:, 3 * RATE // 10 : 4 * RATE // 10] = 0.5
    late = clap.roll(3 * RATE // 10, dims=1)
    motion = np.array([0, 0, 1.0, 1.0, 0, 0, 0])  # it comes, and goes
    expected = [np.corrcoef(motion, np.array(onsets))[0, 1] for onsets in
                ([0, 0, 0.5, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0.5, 0])]  # fmt: skip
    answers = make_scorer("audio_video_sync")([video] * 2, [clap, late], [RATE] * 2, [rate] * 2)
    assert [a["score"] for a in answers] == pytest.approx(expected, abs=1e-6)
    assert expected[0] > 0 > expected[1]
    still, silent = torch.full((8, 3, 4, 4), 0.5), torch.zeros_like(clap)
    answers = make_scorer("audio_video_sync")([still, video], [clap, silent], [RATE] * 2, [rate] * 2)
    assert [a["score"] for a in answers] == [0.0, 0.0]
    with pytest.raises(ValueError, match="is too short for a video of 0.800 s"):
        make_scorer("audio_video_sync")([video], [clap[:, :100]], [RATE], [rate])
    # channels that cancel each other are heard
    stereo = torch.cat([clap, -clap])
    (answer,) = make_scorer("audio_video_sync")([video], [stereo], [RATE], [rate])
    assert answer["score"] == pytest.approx(expected[0], abs=1e-6)


@pytest.mark.parametrize("frames", [9, 17, 33, 57, 81, 121])
def test_a_sound_as_short_as_ltx_2_makes_it(frames):
    """4 L - 3 steps of 10 ms for L latents, 25 a second: the last frame may begin after its end."""
    rate, latents = 24000, round(frames / 24.0 * 25)
    sound = torch.zeros(2, (4 * latents - 3) * rate // 100)
    sound[:, 3000:4000] = 0.5  # frame 3
    video = blinking(frames, 3)
    (answer,) = make_scorer("audio_video_sync")([video], [sound], [rate], [24.0])
    (whole,) = make_scorer("audio_video_sync")(
        [video], [torch.nn.functional.pad(sound, (0, frames * 1000 - sound.shape[1]))], [rate], [24.0]
    )
    assert answer["score"] == pytest.approx(whole["score"], abs=0.1) and answer["score"] > 0.5


@pytest.mark.parametrize("name", ["loudness", "silence"])
def test_a_sound_that_is_none_is_an_error(name):
    with pytest.raises(ValueError, match="NaN or infinite"):
        make_scorer(name)([torch.full((1, 10), math.nan)], [RATE])
    with pytest.raises(ValueError, match="has no samples"):
        make_scorer(name)([torch.zeros(1, 0)], [RATE])


@pytest.mark.parametrize("frame_rate", [0.0, -24.0, math.nan, math.inf])
def test_a_video_that_is_none_is_an_error_and_has_no_score_of_0(frame_rate):
    video, sound = torch.rand(24, 3, 8, 8), torch.rand(1, RATE)
    with pytest.raises(ValueError, match=f"{frame_rate:g} frames a second: expected a number above 0"):
        make_scorer("audio_video_sync")([video], [sound], [RATE], [frame_rate])
    video[5, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="NaN or infinite pixels: the model that drew it has diverged"):
        make_scorer("audio_video_sync")([video], [sound], [RATE], [24.0])


def test_settings_of_sounds_have_ranges():
    with pytest.raises(ValueError, match="loudness.target=3"):
        check_settings("loudness", {"target": 3.0})


# ---- with models ---------------------------------------------------------------------------------------

PROMPTS = ["a dog barks", "rain on a roof, and thunder"]
CLAP_RATE = 8000


@pytest.fixture(scope="module")
def clap(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clap")
    tokenizer = t5_tokenizer()
    tokenizer.save_pretrained(folder)
    text = dict(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=tokenizer.pad_token_id, max_position_embeddings=520,
    )  # fmt: skip
    audio = dict(
        spec_size=32, num_mel_bins=8, hidden_size=16, patch_embeds_hidden_size=8, depths=[1, 1], window_size=2,
        num_attention_heads=[1, 2], num_hidden_layers=2, patch_size=2, patch_stride=[2, 2], aff_block_r=2,
    )  # fmt: skip
    model = ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=16))
    randomise(model).save_pretrained(folder)
    ClapFeatureExtractor(
        feature_size=8, sampling_rate=CLAP_RATE, hop_length=80, max_length_s=1, fft_window_size=128,
        frequency_min=50, frequency_max=4000, truncation="rand_trunc",
    ).save_pretrained(folder)  # fmt: skip
    return folder, model, tokenizer


def test_clap_score_is_the_cosine_of_the_models_own_embeddings(clap):
    folder, model, tokenizer = clap
    sounds = [sine(440.0, 0.5, 0.7), sine(900.0, 0.3, 1.0, channels=2)]
    extractor = ClapFeatureExtractor.from_pretrained(folder)
    expected = []
    for sound, prompt in zip(sounds, PROMPTS, strict=True):
        heard = extractor(sound.mean(0).double().numpy(), sampling_rate=CLAP_RATE, return_tensors="pt")
        with torch.no_grad():
            a = model.get_audio_features(heard["input_features"].float()).pooler_output
            t = model.get_text_features(**tokenizer(prompt, return_tensors="pt")).pooler_output
        expected.append(torch.nn.functional.cosine_similarity(a, t).item())
    scorer = make_scorer("clap_score", {"model": str(folder), "device": "cpu"})
    answers = scorer(sounds, [RATE] * 2, None, PROMPTS, None)
    assert [a["score"] for a in answers] == pytest.approx(expected, abs=1e-5)
    assert abs(expected[0] - expected[1]) > 1e-3
    # a long one is the mean of its parts, and another rate the same sound
    long = torch.cat([sine(440.0, 0.5), sine(900.0, 0.3)], dim=1)
    parts = scorer([long[:, :RATE], long[:, RATE:], long], [RATE] * 3, None, [PROMPTS[0]] * 3, None)
    assert parts[2]["score"] == pytest.approx((parts[0]["score"] + parts[1]["score"]) / 2, abs=1e-5)


def test_clap_that_draws_parts_at_random_is_refused(clap, tmp_path):
    _, model, _ = clap
    config = model.config
    config.audio_config.enable_fusion = True
    ClapModel(config).save_pretrained(tmp_path)
    config.audio_config.enable_fusion = False
    with pytest.raises(RunError, match="take an unfused one"):
        make_scorer("clap_score", {"model": str(tmp_path), "device": "cpu"})


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    tokenizer = t5_tokenizer()
    tokenizer.save_pretrained(folder)
    size = len(tokenizer)
    config = WhisperConfig(
        vocab_size=size, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=50,
        max_target_positions=24, pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1,
    )  # fmt: skip
    model = randomise(WhisperForConditionalGeneration(config), seed=3)
    model.generation_config.max_length, model.generation_config.is_multilingual = 12, False
    model.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=8, sampling_rate=RATE, hop_length=80, chunk_length=1, n_fft=128)
    extractor.save_pretrained(folder)
    return folder, model, tokenizer


def test_asr_text_hears_what_whisper_generates(whisper):
    folder, model, tokenizer = whisper
    sounds, extractor = [sine(440.0, 0.5), sine(1500.0, 0.9)], WhisperFeatureExtractor.from_pretrained(folder)
    heard = []
    for sound in sounds:
        features = extractor(sound[0].double().numpy(), sampling_rate=RATE, return_tensors="pt").input_features
        ids = model.generate(features, do_sample=False, num_beams=1)
        heard.append(tokenizer.batch_decode(ids, skip_special_tokens=True)[0].strip())
    assert all(heard)
    scorer = make_scorer("asr_text", {"model": str(folder), "device": "cpu", "batch_size": 1})
    answers = scorer(sounds, [RATE] * 2, heard, None, None)
    assert [(a["score"], a["asr_text"]) for a in answers] == [(1.0, text) for text in heard]
    (long,) = scorer([torch.cat(sounds, dim=1)], [RATE], [" ".join(heard)], None, None)
    assert long["asr_text"] == " ".join(heard)
    end = torch.cat([sounds[0], sounds[1][:, : RATE // 20]], dim=1)  # of which 50 ms are no part of their own
    assert scorer([end], [RATE], heard[:1], None, None)[0]["asr_text"] == heard[0]
    with pytest.raises(ValueError, match="needs the words to hear"):
        scorer(sounds[:1], [RATE], ["..."], None, None)


def test_what_was_said_is_compared_letter_by_letter():
    assert share_right("Hello, World!", "hello world") == 1.0
    assert share_right("hello word", "hello world") == pytest.approx(1 - 1 / 10)
    assert share_right("a" * 100, "hello") == 0.0
    assert share_right("cafe\u0301", "Caf\u00e9") == 1.0  # one letter, written in two ways
    assert share_right("\uff21\uff22", "ab") == 1.0  # letters as wide as Chinese ones
    hindi = "\u0915\u093f"  # a letter and its vowel, which is a mark
    assert share_right(hindi, hindi) == 1.0 and share_right("\u0915", hindi) == 0.5


def test_pitch_is_the_distance_to_the_named_notes_in_semitones():
    """A4 is 440 Hz, twelve equal steps to the octave; of two channels the mean is heard."""
    semitone = 2 ** (1 / 12)
    melody = torch.cat([sine(440.0), sine(440.0 * semitone), sine(261.6256, channels=1)], dim=1)
    (answer,) = make_scorer("pitch", {"width": 4.0})([melody], [RATE], ["A4 A4 C4"])
    assert answer["score"] == pytest.approx((1 + 0.75 + 1) / 3, abs=0.005)
    assert answer["in_tune"] == pytest.approx(2 / 3)
    names = ["A#4", "Bb4", "C5", "A3"]
    tones = [440.0 * semitone, 440.0 * semitone, 523.2511, 220.0]
    answers = make_scorer("pitch")([sine(tone) for tone in tones], [RATE] * 4, names)
    assert [a["score"] for a in answers] == pytest.approx([1] * 4, abs=0.005)
    overtone = sine(440.0) + 0.5 * sine(880.0)
    quiet = sine(440.0, 1e-4)
    answers = make_scorer("pitch")([overtone, quiet, sine(880.0)], [RATE] * 3, ["A4"] * 3)
    assert [a["score"] for a in answers] == pytest.approx([1, 0, 0], abs=0.005)


@pytest.mark.parametrize(
    ("notes", "said"),
    [("H4", '"H4" is no note'), ("", "names no note"), ("A9", "sample rate"), ("C0 " * 20 + "C0", "two of its waves")],
)
def test_notes_that_nobody_could_play_are_refused(notes, said):
    with pytest.raises(ValueError, match=said):
        make_scorer("pitch")([sine(440.0)], [RATE], [notes])
