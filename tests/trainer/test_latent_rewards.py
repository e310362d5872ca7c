"""Rewards that look at latents (`reward.input=latents`): what is decoded, what they are given, what is refused."""

import asyncio
import json
from collections import Counter

import pytest
import torch
from e2e_runs import metrics, settings
from refusals import refused

from verl_omni.agent_loop.diffusion_agent_loop import DiffusionSingleTurnAgentLoop, register
from verl_omni.pipelines.qwen_image import QwenImage
from verl_omni.report.report import write_report
from verl_omni.rewards.reward_function import RewardError, RewardFunction
from verl_omni.testing.local_trainer import local_config, local_trainer
from verl_omni.utils.errors import RunError
from verl_omni.utils.responses import Latents
from verl_omni.workers.rollout import base
from verl_omni.workers.rollout.diffusers_rollout import DiffusersRollout

INPUT, A = "reward.input=latents", "actor_rollout_ref."
REWARD = "def compute_score(latents, prompts):\n    return [{'score': float(l.abs().mean())} for l in latents]\n"


@pytest.fixture
def decoded(monkeypatch) -> Counter:
    """Images that went through the VAE, and prompts that went through the text encoder."""
    counted, decode, encode = Counter(), QwenImage.decode_latents.__func__, QwenImage.encode_prompt.__func__

    def counting(cls, pipe, latents, model_config):
        counted["images"] += len(latents)
        return decode(cls, pipe, latents, model_config)

    def counting_prompts(cls, pipe, ids, *rest):
        counted[tuple(ids)] += 1
        return encode(cls, pipe, ids, *rest)

    monkeypatch.setattr(QwenImage, "decode_latents", classmethod(counting))
    monkeypatch.setattr(QwenImage, "encode_prompt", classmethod(counting_prompts))
    return counted


def config(folder, *overrides: str, reward: str = REWARD):
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(reward)
    own = f"reward.custom_reward_function.path={folder}/reward.py"
    short = ("trainer.save_freq=0", "trainer.total_training_steps=1")
    return local_config(settings(folder / "run", own, *short, *overrides))


POOL = (f"{A}rollout.pool.size=6", f"{A}rollout.pool.num_inference_steps=2")


WAYS = {"embedded": (), "pool": POOL, "server": ("trainer.mode=separate",)}


@pytest.mark.parametrize(
    "more", [pytest.param(m, id=w, marks=[pytest.mark.slow] if w == "pool" else []) for w, m in WAYS.items()]
)
def test_training_samples_are_not_decoded_and_validation_is_shown(tmp_path, process_group, decoded, more):
    folder = tmp_path / "a"
    local_trainer(config(folder, INPUT, *more)).fit()
    told, run = metrics(folder / "run"), folder / "run"
    shown = sorted(run.glob("validation/step_*/*.png"))
    assert decoded.pop("images") == len(shown) == 4, "two prompts, before and after"
    assert len(decoded) > 1 and set(decoded.values()) == {1}, "a prompt is encoded once, whatever engine draws"
    assert told[1]["actor/grad_norm"] > 0 and told[1]["critic/rewards/mean"] > 0
    assert told[1]["actor/first_ratio_max_dev"] < 1e-5
    assert not (run / "training").exists()
    rows = [json.loads(line) for line in (run / "validation/step_1/samples.jsonl").read_text().splitlines()]
    assert [row["image"] for row in rows] == [file.name for file in shown[2:]] and all(row["score"] > 0 for row in rows)
    assert "training images were not decoded" in write_report(run).read_text()


@register("looks_at_what_it_gets")
class Looks(DiffusionSingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        assert self.server.answers[-1].image.shape == (3, 32, 32) and output.response.values.ndim == 3
        return output


def test_an_agent_loop_of_ones_own_may_look(tmp_path, process_group, decoded):
    own = f"{A}rollout.agent.default_agent_loop=looks_at_what_it_gets"
    local_trainer(config(tmp_path / "a", INPUT, own, "data.val_files=null")).fit()
    assert decoded["images"] == 8


@pytest.mark.slow  # two runs
def test_what_is_drawn_and_trained_does_not_depend_on_it(tmp_path, process_group, decoded):
    """A reward that looks at neither: all numbers of both runs are the same."""
    blind = "def compute_score(prompts):\n    return list(range(len(prompts)))\n"
    runs = []
    for name, more in (("a", []), ("b", [INPUT])):
        local_trainer(config(tmp_path / name, *more, reward=blind)).fit()
        runs.append(metrics(tmp_path / name / "run"))
    for step, one in runs[0].items():
        same = {key: value for key, value in one.items() if key.split("/")[0] in ("actor", "critic", "val-core")}
        assert same == {key: runs[1][step][key] for key in same}
    assert decoded["images"] == 4 + 4 + 8


def test_a_function_is_given_latents_and_nothing_else():
    one = Latents(torch.arange(24.0).reshape(2, 3, 4), decoded=torch.zeros(3, 8, 8, dtype=torch.uint8))
    sample = {"response": one, "prompt": "a cat"}
    single = RewardFunction(lambda latent, image=None: float(latent.sum()) if image is None else 0.0, "single")
    many = RewardFunction(lambda latents, prompts: [len(prompts[0]) + float(v.sum()) for v in latents], "many")
    assert asyncio.run(single.score([sample]))[0]["score"] == 276.0
    assert [a["score"] for a in asyncio.run(many.score([sample, sample]))] == [281.0, 281.0]
    asks = RewardFunction(lambda image: 0.0, "asks")
    with pytest.raises(RewardError, match="asks for image, and what it is given is latents: .*; leave reward.input"):
        asyncio.run(asks.score([sample]))
    with pytest.raises(RewardError, match="asks for latent, and what the model makes is image: .*; a run gives them"):
        asyncio.run(single.score([{"response": one.decoded, "prompt": ""}]))


def test_what_leaves_a_process_is_a_copy_of_its_own():
    """A view would take its whole batch along."""
    batch = torch.zeros(8, 4, 2, 2), torch.zeros(8, 3, 4, 4, dtype=torch.uint8)
    for decoded in (None, batch[1][0]):
        sent = base.RolloutOutput(Latents(batch[0][0], decoded)).cpu().response
        assert sent.values.untyped_storage().nbytes() == 4 * 16 and (sent.decoded is None) == (decoded is None)
    assert sent.decoded.untyped_storage().nbytes() == 48


def test_a_scorer_that_wants_pixels_is_refused(tmp_path):
    with pytest.raises(RunError, match='"jpeg_compressibility" asks for images, and what it is given is latents'):
        local_config(settings(tmp_path / "run", INPUT, "reward.scorers=[{name: jpeg_compressibility}]"))
    with pytest.raises(RunError, match="asks for latents, and what the model makes is image: .*; a run gives them"):
        config(tmp_path)
    with pytest.raises(ValueError, match="by=pair compares pictures, and rewards are given latents: use by=score"):
        config(tmp_path, INPUT, "reward.pairwise.by=pair", "data.val_files=null")


def test_an_engine_that_has_none_is_refused(monkeypatch):
    monkeypatch.setattr(DiffusersRollout, "gives_latents", False)
    assert "reward.input=latents: the rollout engine diffusers does not say that it gives them" in refused(INPUT)
    monkeypatch.undo()
    monkeypatch.setattr(DiffusersRollout, "makes", lambda model: "text")
    assert refused(INPUT) == "reward.input=latents: the model makes text, which has none; leave it out"
