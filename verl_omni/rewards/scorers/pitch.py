"""Does a sound play the wanted notes? A reward without weights: the strongest frequency of each note's time."""

import re
from typing import Annotated, Any

import numpy as np

from verl_omni.config.knob import Range
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.sounds import loudness_of, mono

Semitones = Annotated[float, Range(above=0, most=24)]
Decibels = Annotated[float, Range(least=-120, most=0)]

STEPS = {"C": 0, "D": 2, "E": 4, "F": 5, "G": 7, "A": 9, "B": 11}  # semitones above C
SIGNS = {"": 0, "#": 1, "b": -1}
LOWEST = 40.0  # Hz: below it a frequency is rather a drift than a note
FINER = 8  # the spectrum is looked at in so many steps for each that the window's length gives
IN_TUNE = 0.5  # semitones: nearer to this note than to any other


def frequency_of(note: str) -> float:
    """Of A4 440 Hz, and of all others in equal temperament: C4, F#3, Bb5."""
    read = re.fullmatch(r"([A-G])([#b]?)(-?\d)", note)
    if read is None:
        raise ValueError(f'"{note}" is no note: expected a letter, # or b or none, and the octave, such as C4 or F#3')
    letter, sign, octave = read.groups()
    return 440.0 * 2 ** ((STEPS[letter] + SIGNS[sign] + 12 * (int(octave) - 4) - STEPS["A"]) / 12)


def strongest_frequency(wave: np.ndarray, sample_rate: int) -> float:
    """Where a Hann-windowed wave has its largest magnitude, in Hz."""
    points = FINER * len(wave)
    heights = np.abs(np.fft.rfft(wave * np.hanning(len(wave)), points))
    frequencies = np.fft.rfftfreq(points, 1 / sample_rate)
    heights[frequencies < LOWEST] = 0
    return float(frequencies[heights.argmax()])


def semitones_off(wave: np.ndarray, sample_rate: int, notes: list[str], below: float) -> list[float]:
    """How far each note's equal share of the time is from it; a silent one is infinitely far."""
    found = []
    for note, part in zip(notes, np.array_split(wave, len(notes)), strict=True):
        wanted = frequency_of(note)
        if wanted >= sample_rate / 2 or len(part) < 2 * sample_rate / wanted:
            raise ValueError(
                f"{note} ({wanted:.0f} Hz) cannot be heard in {len(part)} samples at {sample_rate} Hz: expected two of "
                "its waves at least, and a sample rate of more than twice its frequency"
            )
        silent = loudness_of(part) <= below
        found.append(np.inf if silent else abs(12 * np.log2(strongest_frequency(part, sample_rate) / wanted)))
    return found


@register_reward("pitch", reads=("ground_truth",))
def compute_score_pitch(
    audios: list,
    sample_rates: list[int],
    ground_truths: list[str],
    *_: Any,
    width: Semitones = 4.0,
    below: Decibels = -50.0,
) -> list[dict[str, float]]:
    """Does the sound play the notes of the ground truth, such as "C4 E4 G4"? The mean of 1 - semitones off / width.

    Each note has an equal share of the time. What counts is the strongest frequency there; from ``width`` semitones
    away on, or where it is silent (at or ``below`` so many decibels), a note has 0. Answers with the share of notes
    that are ``in_tune`` too: less than half a semitone off.
    """
    answers = []
    for audio, rate, truth in zip(audios, sample_rates, ground_truths, strict=True):
        notes = truth.split()
        if not notes:
            raise ValueError('the ground truth names no note: expected some, such as "C4 E4 G4"')
        off = np.array(semitones_off(mono(audio, rate), rate, notes, below))
        score, in_tune = np.maximum(0, 1 - off / width).mean(), (off < IN_TUNE).mean()
        answers.append({"score": float(score), "in_tune": float(in_tune)})
    return answers
