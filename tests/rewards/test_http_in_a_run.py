"""A run whose reward is behind a server: its scores, and its words where it has none."""

import asyncio

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from reward_servers import mean_scorer, serving
from verl.protocol import DataProto

from verl_omni.rewards.image_manager import ImageRewardManager


def test_a_run_asks_the_server_and_tells_its_words():
    def of_colour(red: int) -> DataProto:
        row = {
            "data_source": "http",
            "prompt": "p",
            "reward_model": {"ground_truth": "t"},
            "extra_info": {"index": red},
        }
        pixels = torch.full((1, 3, 4, 6), red, dtype=torch.uint8)
        columns = {key: np.array([value], dtype=object) for key, value in row.items()}
        return DataProto.from_dict(tensors={"responses": pixels}, non_tensors=columns)

    def scores(settings: dict) -> list[dict]:
        async def run():
            reward = {"batch_size": 4, "on_failure": "stop", "scorers": {"http": settings}}
            config = OmegaConf.create({"reward": reward})
            manager = ImageRewardManager(config, None)
            return await asyncio.gather(*(manager.run_single(of_colour(red)) for red in (7, 8, 9)))

        return asyncio.run(run())

    with serving({"mean": mean_scorer}) as server:
        answers = scores({"address": server.address, "scorer": "mean"})
        assert [answer["reward_score"] for answer in answers] == [7.0, 8.0, 9.0]
        assert answers[1]["reward_extra_info"] == {"truth": "t", "prompt": "p", "index": 8}
        with pytest.raises(ValueError) as error:
            scores({"address": server.address, "scorer": "maen"})
    said = f'{server.address}/v1/score/maen answers 404 unknown scorer "maen": did you mean "mean"? known: mean'
    assert str(error.value) == f'reward function "http" raised RewardServerError: {said} (prompt: "p")'
