"""Sounds as scorers take them: one channel, at the rate that a model was trained on."""

from typing import Any

import numpy as np

from verl_omni.utils.responses import Sound, check_sound


def mono(audio: Any, sample_rate: int) -> np.ndarray:
    """The mean of its channels (channels x time), float64."""
    check_sound(Sound(audio, sample_rate))
    if not audio.shape[1]:
        raise ValueError("a sound has no samples: there is nothing to score")
    return audio.double().mean(dim=0).numpy()


def resampled(wave: np.ndarray, sample_rate: int, wanted: int) -> np.ndarray:
    """The same sound at another rate: what both rates can hold of its spectrum, exactly."""
    if sample_rate == wanted:
        return wave
    length = max(1, round(len(wave) * wanted / sample_rate))
    return np.fft.irfft(np.fft.rfft(wave)[: length // 2 + 1], length) * (length / len(wave))


def loudness_of(wave: np.ndarray) -> float:
    """Root of the mean square in decibels: 0 for a square wave as loud as can be, at least -120."""
    return float(20 * np.log10(max(np.sqrt(np.mean(np.square(wave))), 1e-6)))


def windows(wave: np.ndarray, length: int) -> list[np.ndarray]:
    """One after the other; the last one may be shorter."""
    return [wave[start : start + length] for start in range(0, len(wave), length)]
