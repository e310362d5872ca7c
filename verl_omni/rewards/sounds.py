"""Sounds as scorers take them: whole, or one channel at the rate that a model was trained on; and in parts."""

from typing import Any

import numpy as np

from verl_omni.utils.responses import Sound, check_sound


def samples_of(audio: Any, sample_rate: int) -> np.ndarray:
    """All of them, channels x time, float64."""
    check_sound(Sound(audio, sample_rate))
    if not audio.shape[1]:
        raise ValueError("a sound has no samples: there is nothing to score")
    return audio.double().numpy()


def mono(audio: Any, sample_rate: int) -> np.ndarray:
    """The mean of its channels, for models. Channels that cancel each other are silent in it: it tells no level."""
    return samples_of(audio, sample_rate).mean(axis=0)


def resampled(wave: np.ndarray, sample_rate: int, wanted: int) -> np.ndarray:
    """The same sound at another rate: what both rates can hold of its spectrum, exactly."""
    if sample_rate == wanted:
        return wave
    length = max(1, round(len(wave) * wanted / sample_rate))
    return np.fft.irfft(np.fft.rfft(wave)[: length // 2 + 1], length) * (length / len(wave))


def loudness_of(samples: np.ndarray) -> float:
    """Root of the mean square of all channels in decibels: 0 for a square wave as loud as can be, at least -120."""
    return float(20 * np.log10(max(np.sqrt(np.mean(np.square(samples))), 1e-6)))


def windows(samples: np.ndarray, length: int) -> list[np.ndarray]:
    """One after the other in time; the last one may be shorter."""
    return [samples[..., start : start + length] for start in range(0, samples.shape[-1], length)]


def full_windows(wave: np.ndarray, length: int) -> list[np.ndarray]:
    """As few as reach all of it, each of the full length: the last one ends with the sound. A short sound is one."""
    last = max(0, len(wave) - length)
    return [wave[start : start + length] for start in (*range(0, last, length), last)]
