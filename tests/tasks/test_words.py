"""The task `words`: signs that the OCR reads, with words that are held out."""

import numpy as np
import pytest

from verl_omni.tasks import words


def test_the_ocr_reads_the_signs():
    pytest.importorskip("rapidocr")
    rng, wanted = np.random.default_rng(0), words.split_words()[1][:12]
    answers = words.score([words.draw_sign(word, rng) for word in wanted], list(wanted))
    assert np.mean([answer["exact"] for answer in answers]) > 0.8 and min(a["tidy"] for a in answers) > 0.9


def test_grey_is_untidy():
    assert words.tidy(np.full((32, 96, 3), 135, np.uint8)) < 0.2


def test_words_have_three_to_eight_letters_and_are_in_one_half():
    train, held_out = words.split_words()
    assert not {*train} & {*held_out} and {len(word) for word in train} == set(range(3, 9))
    assert {row["reward_model"]["ground_truth"] for row in words.rows("val")} <= {*held_out}
    _, asked = words.training_pictures(50, 0, "cpu")
    assert not {*held_out} & {word for _, word in asked} and asked[0][0] == words.prompt_of(asked[0][1])
