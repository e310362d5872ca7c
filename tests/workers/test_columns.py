"""Columns of several batches become one: text is filled up at its end, and nothing that is declared is."""

import pytest
import torch

from verl_omni.workers.columns import DECLARED, concatenated

PER_SAMPLE = ["clean_latents", "final_latents", "responses"]


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_samples_of_several_sizes_are_no_zeros(name):
    assert DECLARED[name].per == "sample"
    with pytest.raises(ValueError, match=rf"have {name} of \(4, 2\) and \(6, 2\): expected one shape for all"):
        concatenated(name, [torch.ones(1, 4, 2), torch.ones(1, 6, 2)])
    assert concatenated(name, [torch.ones(1, 4, 2), torch.ones(2, 4, 2)]).shape == (3, 4, 2)


def test_steps_of_several_numbers_are_told_as_such():
    with pytest.raises(ValueError, match="samples of one batch have 4 and 6 steps of all_timesteps"):
        concatenated("all_timesteps", [torch.ones(1, 4), torch.ones(1, 6)])


def test_text_features_are_filled_up():
    found = concatenated("prompt_embeds", [torch.ones(1, 4, 2), torch.ones(1, 6, 2)])
    assert found.shape == (2, 6, 2) and found.sum() == 20
