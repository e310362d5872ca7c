"""Sounds of four notes out of seven, and the one melody that is wanted of them."""

from pathlib import Path

import numpy as np

from verl_omni.rewards.scorers.pitch import frequency_of

CHECKPOINT = Path(__file__).parent / "model"  # what a run starts from; `generator.py` says how it was made
NOTES, LENGTH, OCTAVE = "CDEFGAB", 4, 4
MELODY = "CEGA"
PROMPT = "a tune"
SAMPLE_RATE, NOTE_SAMPLES = 2000, 256
SECONDS = LENGTH * NOTE_SAMPLES / SAMPLE_RATE
TRAIN, VAL = 64, 128  # rows of data, which differ in their noise alone


def any_notes(rng: np.random.Generator) -> str:
    return "".join(rng.choice(list(NOTES), LENGTH))


def named_notes(melody: str) -> str:
    """What the reward compares with. CEGA: C4 E4 G4 A4."""
    return " ".join(f"{note}{OCTAVE}" for note in melody)


def play(melody: str, rng: np.random.Generator) -> np.ndarray:
    """Samples in [-1, 1], float32: each note is struck and dies away, louder or softer, with an octave above it."""
    time = np.arange(NOTE_SAMPLES) / SAMPLE_RATE
    fades = np.minimum(1, time / 0.005) * np.exp(-time / rng.uniform(0.08, 0.3))
    loudness, octave = rng.uniform(0.4, 0.7), rng.uniform(0, 0.4)
    parts = []
    for note in melody:
        angle = 2 * np.pi * frequency_of(f"{note}{OCTAVE}") * time + rng.uniform(0, 2 * np.pi)
        parts.append(loudness * fades * (np.sin(angle) + octave * np.sin(2 * angle)) / (1 + octave))
    return (np.concatenate(parts) + rng.normal(0, 0.005, LENGTH * NOTE_SAMPLES)).astype(np.float32)
