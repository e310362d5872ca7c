"""The agent loop with an engine and reward workers that the tests hold in their hands: no processes."""

import asyncio
import json
import threading
from unittest import mock

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from tiny_models import tiny_checkpoint
from verl.protocol import DataProto

from verl_omni.agent_loop.diffusion_agent_loop import (
    DiffusionAgentLoopOutput,
    DiffusionAgentLoopWorker,
    DiffusionSingleTurnAgentLoop,
    register,
)
from verl_omni.agent_loop.manager import DiffusionAgentLoopManager, assign
from verl_omni.agent_loop.outputs import collate, join, side_by_side
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.data import PromptDataset, create_val_dataloader
from verl_omni.rewards.image_manager import ImageRewardManager
from verl_omni.trainer.diffusion.base_trainer import BaseRayDiffusionTrainer
from verl_omni.trainer.diffusion.diffusion_metric_utils import compute_data_metrics_diffusion
from verl_omni.trainer.diffusion.validation import validation_metrics, write_samples
from verl_omni.utils.arrays import object_array
from verl_omni.utils.batcher import Batcher
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.trajectories import TrajectoryStore

GUARD = 60


class Remote:
    """`handle.method.remote(...)`, as a Ray actor is called."""

    def __init__(self, **methods):
        for name, method in methods.items():
            setattr(self, name, type("Method", (), {"remote": staticmethod(method)}))


async def until(event: threading.Event) -> None:
    """Rewards have an event loop of their own, in another thread."""
    while not event.is_set():
        await asyncio.sleep(0.005)


def config(batch_size: int = 4, max_num_seqs: int = 32, on_failure: str = "stop", n: int = 16):
    tree = OmegaConf.structured(DiffusionTrainerConfig)
    tree.actor_rollout_ref.rollout.n = n
    tree.actor_rollout_ref.rollout.max_num_seqs = max_num_seqs
    tree.actor_rollout_ref.model.path = str(tiny_checkpoint())
    tree.reward.batch_size, tree.reward.on_failure, tree.reward.retries = batch_size, on_failure, 0
    return tree


def batch(sources: list[str]) -> DataProto:
    data = DataProto.from_dict(
        tensors={"dummy": torch.zeros(len(sources))},
        non_tensors={
            "prompt": object_array([f"prompt {i}" for i in range(len(sources))]),
            "data_source": object_array(sources),
            "reward_model": object_array([{"ground_truth": str(i)} for i in range(len(sources))]),
            "seed": object_array(list(range(len(sources)))),
        },
    )
    data.meta_info["sampling_params"] = {"max_sequence_length": 64, "negative_prompt": " "}
    return data


def run(data, score, generate=None, servers=1, reward_workers=1, then=None, images_to=None, withdraw=None, **settings):
    async def image(prompt_ids, sampling_params, **rest):
        return RolloutOutput(torch.full((3, 2, 2), sampling_params["seed"], dtype=torch.uint8))

    loop = asyncio.new_event_loop()
    tree = config(**settings)
    methods = {"withdraw": withdraw} if withdraw else {}
    rewards = [
        Remote(compute_score=ImageRewardManager(tree, None, compute_score=score).run_single)
        for _ in range(reward_workers)
    ]
    engines = [Remote(generate=generate or image, **methods)] * servers
    worker = DiffusionAgentLoopWorker(tree, engines, rewards)

    def wait(coroutine):
        return loop.run_until_complete(asyncio.wait_for(coroutine, GUARD))

    here = Remote(generate_images=worker.generate_images, collect_scores=worker.collect_scores)
    manager = DiffusionAgentLoopManager(tree, engines, rewards, workers=[here])
    if then is None:
        assign(data, servers, manager.num_reward_workers, manager.max_num_seqs)
        return wait(worker.generate_sequences(data))
    with mock.patch("ray.get", lambda calls: [wait(call) for call in calls]):
        images, scores = manager.generate_images(data, images_to)
        then(images)
        return side_by_side(images, scores())


@pytest.mark.parametrize("reward_workers", [1, 2, 3])
def test_mixed_sources_in_one_batch_all_get_their_scores(reward_workers):
    batches = []

    def many(images, prompts, data_sources):
        assert len(set(data_sources)) == 1
        batches.append(tuple(prompts))
        return [float(p.split()[1]) for p in prompts]

    data = batch(["a", "b", "a", "c", "a", "b", "a", "a", "a", "a", "a"])
    output = run(data, many, reward_workers=reward_workers)
    assert output.batch["rm_scores"][:, 0].tolist() == list(range(11))
    assert sum(map(len, batches)) == 11 and max(map(len, batches)) <= 4
    again = []
    run(batch(["a", "b", "a", "c", "a", "b", "a", "a", "a", "a", "a"]),
        lambda images, prompts: again.append(tuple(prompts)) or [0.0] * len(images),
        reward_workers=reward_workers)  # fmt: skip
    assert sorted(again) == sorted(batches)


@pytest.mark.parametrize(
    ("scores_only", "reward_workers", "travels"), [(False, 1, True), (True, 1, False), (True, 0, True)]
)
def test_pixels_travel_only_where_someone_looks_at_them(scores_only, reward_workers, travels):
    """Without reward workers the scores are still to come, and they need the pixels."""
    data = batch(["a", "a"])
    data.meta_info["scores_only"] = scores_only
    output = run(data, lambda images: [1.0] * len(images), reward_workers=reward_workers, then=lambda images: None)
    assert ("responses" in output.batch.keys()) == travels
    assert ("rm_scores" in output.batch.keys()) == bool(reward_workers)


@pytest.mark.parametrize("reward_workers", [0, 1])
def test_of_each_image_a_small_copy_travels(reward_workers):
    """Row i's image is of colour i."""
    data = batch(["a"] * 3)
    data.meta_info["scores_only"] = True
    output = run(data, lambda prompt: 1.0, reward_workers=reward_workers, then=lambda images: None)
    copies = list(output.non_tensor_batch["coarse"])
    assert [copy.mean() for copy in copies] == [0, 1, 2] and all(copy.nbytes < 1000 for copy in copies)


def test_who_draws_the_images_writes_them(tmp_path):
    """The first three of four; the driver gets names and scores."""
    data = batch(["a"] * 4)
    data.meta_info["scores_only"] = True
    files = {i: str(tmp_path / f"step/{i:05d}") for i in range(3)}
    output = run(data, lambda prompt: 1.0, then=lambda images: None, images_to=files)
    assert output.non_tensor_batch["written"].tolist() == [{"image": f"0000{i}.png"} for i in range(3)] + [None]
    assert "responses" not in output.batch.keys()
    assert Image.open(tmp_path / "step/00002.png").getpixel((0, 0)) == (2, 2, 2)


class Twice(DiffusionSingleTurnAgentLoop):
    """Samples with an even seed draw a second time; sample 3 draws nothing at all."""

    async def run(self, sampling_params, **kwargs):
        if sampling_params["seed"] == 3:
            return DiffusionAgentLoopOutput(torch.zeros(3, 2, 2, dtype=torch.uint8), [], {})
        output = await super().run(sampling_params, **kwargs)
        return output if sampling_params["seed"] % 2 else await super().run(sampling_params, **kwargs)


def test_loops_of_unequal_length_do_not_wait_for_each_other():
    """Batches of two by place: 0 and 1 meet, 2 is alone where 3 gave its place back, second turns come as they come."""
    register("twice")(Twice)
    drawn = []

    def work(seeds):
        drawn.append(tuple(seeds))
        return [RolloutOutput(torch.zeros(3, 2, 2, dtype=torch.uint8), version=7) for _ in seeds]

    batcher = Batcher(work, max_size=2, max_wait_s=0.01)

    async def generate(prompt_ids, sampling_params, **rest):
        return await batcher.submit(sampling_params["seed"], None, sampling_params.get("position"))

    async def withdraw(position):
        batcher.withdraw(position)

    data = batch(["a"] * 4)
    data.non_tensor_batch["agent_name"] = object_array(["twice"] * 4)
    output = run(data, lambda prompt: 1.0, generate, withdraw=withdraw)
    assert sorted(seed for part in drawn for seed in part) == [0, 0, 1, 2, 2]
    assert (0, 1) in drawn and (2,) in drawn
    assert output.non_tensor_batch["version"].tolist() == [7, 7, 7, 0]


class BestOfTwo(DiffusionSingleTurnAgentLoop):
    """Draws twice with parameters of its own, and returns the first."""

    async def run(self, sampling_params, **kwargs):
        own = {k: sampling_params[k] for k in ("seed", "max_sequence_length", "negative_prompt")}
        first = await super().run(own, **kwargs)
        await super().run(own, **kwargs)
        return first


def test_what_is_trained_on_is_the_image_that_the_loop_returned():
    register("best_of_two")(BestOfTwo)
    store = TrajectoryStore()

    async def generate(prompt_ids, sampling_params, **rest):
        drawn = len(store.rows)
        output = RolloutOutput(torch.full((3, 2, 2), drawn, dtype=torch.uint8), {"final_latents": torch.tensor(drawn)})
        assert ("position" in sampling_params) == (drawn == 0)
        return store.keep(sampling_params["place"]["key"], output)

    data = batch(["a"])
    data.non_tensor_batch["agent_name"] = object_array(["best_of_two"])
    data.non_tensor_batch["place"] = object_array([{"key": "e0/0", "ship": False}])
    output = run(data, lambda prompt: 1.0, generate)
    assert len(store.rows) == 2
    (reference,) = output.non_tensor_batch["trajectory"]
    assert store.rows[reference.key]["final_latents"] == output.batch["responses"][0, 0, 0, 0] == 0


def test_two_batches_can_be_under_way():
    """Both are made before either is scored; each gets its own scores."""

    async def image(prompt_ids, sampling_params, **rest):
        return RolloutOutput(torch.full((3, 2, 2), sampling_params["seed"], dtype=torch.uint8))

    async def both():
        rewards = Remote(compute_score=ImageRewardManager(config(), None, compute_score=score).run_single)
        worker = DiffusionAgentLoopWorker(config(), [Remote(generate=image)], [rewards])
        for name, data in batches.items():
            assign(data, 1, 1, 32, name)
            await worker.generate_images(data, name)
        return [(await worker.collect_scores(name)).batch["rm_scores"][:, 0].tolist() for name in ("two", "one")]

    def score(prompt, extra_info):
        return float(prompt[-1]) + extra_info["plus"]

    batches = {"one": batch(["a"] * 2), "two": batch(["a"] * 2)}
    for data, plus in zip(batches.values(), (0, 10), strict=True):
        data.non_tensor_batch["extra_info"] = object_array([{"plus": plus}] * 2)
    assert asyncio.run(asyncio.wait_for(both(), GUARD)) == [[10.0, 11.0], [0.0, 1.0]]


def test_an_image_is_scored_while_others_are_still_being_made():
    """The second image is made only after the first has its score: rewards at the end would wait for ever."""
    order, first_scored = [], threading.Event()

    async def generate(prompt_ids, sampling_params, **rest):
        seed = sampling_params["seed"]
        if seed == 1:
            await until(first_scored)
        order.append(f"image {seed}")
        return RolloutOutput(torch.full((3, 2, 2), seed, dtype=torch.uint8))

    async def score(prompt):
        order.append(f"score {prompt[-1]}")
        first_scored.set()
        return 1.0

    run(batch(["a", "a"]), score, generate)
    assert order == ["image 0", "score 0", "image 1", "score 1"]


def test_a_batch_of_rewards_does_not_wait_for_the_next_forward():
    """Four images fit into a call of the reward, but an engine that makes two at a time has them in two calls."""
    first_scored, calls = threading.Event(), []

    async def generate(prompt_ids, sampling_params, **rest):
        if sampling_params["seed"] >= 2:
            await until(first_scored)
        return RolloutOutput(torch.zeros(3, 2, 2, dtype=torch.uint8))

    async def score(images, prompts):
        calls.append(prompts)
        first_scored.set()
        return [1.0] * len(images)

    run(batch(["a"] * 4), score, generate, max_num_seqs=2)
    assert calls == [["prompt 0", "prompt 1"], ["prompt 2", "prompt 3"]]


def test_trajectories_are_there_before_the_scores():
    """The trainer goes on with the reference pass while the last rewards are computed."""
    allowed = threading.Event()

    async def generate(prompt_ids, sampling_params, **rest):
        latents = torch.full((2,), float(sampling_params["seed"]))
        return RolloutOutput(torch.zeros(3, 2, 2, dtype=torch.uint8), {"final_latents": latents})

    async def score(prompt):
        await until(allowed)
        return float(prompt[-1])

    def then(images):
        assert images.batch["final_latents"][:, 0].tolist() == [0.0, 1.0]
        assert list(images.batch.keys()) == ["final_latents"]
        allowed.set()

    output = run(batch(["a", "a"]), score, generate, then=then)
    assert output.batch["rm_scores"][:, 0].tolist() == [0.0, 1.0]
    assert output.batch["final_latents"][:, 0].tolist() == [0.0, 1.0]
    assert set(output.meta_info["timing"]) == {"images", "rewards"}


def test_nobody_waits_for_scores_in_a_thread():
    """A thread that waits for Ray at the end of the process would keep it from ending."""
    half = DataProto.from_dict(tensors={"x": torch.zeros(2)}, meta_info={"timing": {}})
    worker = Remote(generate_images=lambda batch, name: half, collect_scores=lambda *_: half)
    tree = OmegaConf.create({"actor_rollout_ref": {"hybrid_engine": True, "rollout": {"max_num_seqs": 1}}})
    manager = DiffusionAgentLoopManager(tree, [None], [None], workers=[worker])
    waits = []
    with mock.patch("ray.get", lambda calls: waits.append(threading.current_thread()) or calls):
        _, collect = manager.generate_images(batch(["mine"] * 2))
        assert waits == [threading.main_thread()]
        collect()
    assert waits == [threading.main_thread()] * 2


@pytest.mark.parametrize("awake", [False, True])
def test_a_reward_that_blocks_its_whole_process(awake):
    """A function that holds Python's lock keeps its process from watching the time; one that is slow does not."""
    tree = config()
    tree.reward.timeout = 0.2
    tree.reward.custom_reward_function.path, tree.reward.custom_reward_function.name = "/mine/judge.py", "score_it"

    async def compute_score(data):
        await (asyncio.sleep(1.0) if awake else asyncio.Event().wait())
        return {"reward_score": 0.5}

    async def is_awake():
        return awake or await asyncio.Event().wait()

    async def image(prompt_ids, sampling_params, **rest):
        return RolloutOutput(torch.zeros(3, 2, 2, dtype=torch.uint8))

    reward = Remote(compute_score=compute_score, is_awake=is_awake)
    worker, data = DiffusionAgentLoopWorker(tree, [Remote(generate=image)], [reward]), batch(["mine"])
    assign(data, 1, 1, 4)
    answer = asyncio.wait_for(worker.generate_sequences(data), GUARD)
    if awake:
        assert asyncio.new_event_loop().run_until_complete(answer).batch["rm_scores"].tolist() == [[0.5]]
        return
    with pytest.raises(Exception, match=r'score_it \(judge.py\) blocks its whole process .* 0.2 s .*"prompt 0"'):
        asyncio.new_event_loop().run_until_complete(answer)


def test_a_failing_reward_does_not_wait_for_the_other_images():
    async def generate(prompt_ids, sampling_params, **rest):
        if sampling_params["seed"] == 1:
            await asyncio.Event().wait()
        return RolloutOutput(torch.zeros(3, 2, 2, dtype=torch.uint8))

    def broken(prompt):
        raise OSError("the judge is down")

    with pytest.raises(Exception, match="the judge is down"):
        run(batch(["a", "a"]), broken, generate)


def test_a_failing_reward_ends_the_batch_with_its_own_words():
    def broken(prompt):
        return float("nan") if prompt == "prompt 2" else 1.0

    with pytest.raises(ValueError, match=r'reward function broken returned nan.*prompt: "prompt 2"'):
        run(batch(["a"] * 4), broken)


def test_requests_carry_their_seed_and_place():
    seen = {}

    async def generate(prompt_ids, sampling_params, request_id, negative_prompt_ids, **rest):
        seen[sampling_params["seed"]] = (sampling_params["position"], tuple(prompt_ids), request_id)
        return RolloutOutput(torch.zeros(3, 2, 2, dtype=torch.uint8))

    run(batch(["a"] * 5), lambda prompt: 1.0, generate, servers=2)
    assert [seen[i][0][:2] for i in range(5)] == [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]
    assert len({ids for _, ids, _ in seen.values()}) == 5 and len({r for _, _, r in seen.values()}) == 5


def test_an_unknown_agent_name_is_named():
    data = batch(["a"])
    data.non_tensor_batch["agent_name"] = object_array(["diffusion_single_turn"])
    with pytest.raises(ValueError, match='did you mean "diffusion_single_turn_agent"'):
        run(data, lambda prompt: 1.0)


OURS = ("uid", "seed", "server", "sample_id", "position", "burst", "reward_worker", "data_source", "prompt", "index")


def test_names_of_the_user_and_of_the_run_do_not_meet(tmp_path):
    """A reward's dict and the data's columns may use any name; rows, groups, seeds and samples.jsonl stay the run's."""
    rows = [
        {"data_source": "a", "prompt": f"prompt {i}", "reward_model": {"ground_truth": str(i)}, "difficulty": i}
        | dict.fromkeys(("uid", "seed", "server", "sample_id", "position", "burst"), 99)
        for i in range(2)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (loaded,) = create_val_dataloader(PromptDataset(tmp_path / "rows.jsonl"))
    seen = []

    def score(prompt, extra_info):
        seen.append((prompt, extra_info["difficulty"], extra_info["server"]))
        return {"score": float(prompt[-1])} | dict.fromkeys(OURS, 5)

    trainer = mock.Mock(global_step=3)
    prompts = DataProto.from_single_dict(loaded)
    sampling = {"max_sequence_length": 64, "negative_prompt": " "}
    data = BaseRayDiffusionTrainer._rollout_batch(trainer, prompts, 2, np.arange(4), sampling, step=3)
    output = run(data, score)
    output.non_tensor_batch["written"] = object_array([{"image": f"{i}.png"} for i in range(4)])
    trainer.agent_loop_manager.start_images.return_value = lambda: (output, lambda: output)
    trainer.scored_rows = lambda *rows: BaseRayDiffusionTrainer.scored_rows(trainer, *rows)
    _, scores = BaseRayDiffusionTrainer._draw(trainer, data, "current")()
    result = scores()
    assert sorted(seen) == [("prompt 0", 0, 99)] * 2 + [("prompt 1", 1, 99)] * 2
    assert result.non_tensor_batch["uid"].tolist() == ["3-0", "3-0", "3-1", "3-1"]
    assert result.non_tensor_batch["seed"].tolist() == [0, 1, 2, 3]
    assert compute_data_metrics_diffusion(result.union(rewards(result)))["critic/rewards/group_size"] == 2
    assert validation_metrics(result, 2) == {"val-core/a/reward/mean@2": 0.5} | {
        f"val-aux/a/{name}/mean@2": 5.0 for name in OURS
    }
    write_samples(result, tmp_path / "images")
    lines = [json.loads(line) for line in (tmp_path / "images/samples.jsonl").read_text().splitlines()]
    assert [(line["seed"], line["index"], line["prompt"]) for line in lines] == [
        (0, 0, "prompt 0"), (1, 1, "prompt 0"), (2, 2, "prompt 1"), (3, 3, "prompt 1"),
    ]  # fmt: skip
    assert lines[0]["reward_extra_info"] == dict.fromkeys(OURS, 5)


def rewards(batch: DataProto) -> DataProto:
    return DataProto.from_dict({"sample_level_rewards": batch.batch["rm_scores"][:, 0]})


def test_compute_score_is_for_a_subclass_to_override(monkeypatch):
    """Under its documented name and with its documented arguments."""

    async def _compute_score(self, output, prompts, responses, attention_mask, input_ids, kwargs):
        assert prompts.tolist() == input_ids.tolist() == [output.prompt_ids]
        assert attention_mask.tolist() == [[1] * len(output.prompt_ids)]
        output.reward_score = responses[0].float().mean().item() + int(kwargs["reward_model"]["ground_truth"])

    monkeypatch.setattr(DiffusionAgentLoopWorker, "_compute_score", _compute_score)
    output = run(batch(["a"] * 3), lambda prompt: -1.0)
    assert output.batch["rm_scores"][:, 0].tolist() == [0.0, 2.0, 4.0]


def test_the_name_of_an_agent_loop_is_taken_once():
    class Other(DiffusionSingleTurnAgentLoop):
        pass

    with pytest.raises(ValueError, match='agent loop "diffusion_single_turn_agent" is already registered by verl_omni'):
        register("diffusion_single_turn_agent")(Other)
    register("diffusion_single_turn_agent")(DiffusionSingleTurnAgentLoop)  # the same again is no conflict


def test_chunks_whose_rewards_tell_different_things_are_joined():
    chunks = [
        DataProto.from_dict(
            tensors={"rm_scores": torch.tensor([[1.0]] * 2), "prompt_embeds": torch.ones(2, length, 3)},
            non_tensors={"reward_extra_info": object_array([{key: "x"}, {key: "y"}])},
            meta_info={"timing": {"images": float(length)}},
        )
        for key, length in (("read", 2), ("size", 4))
    ]
    joined = join(chunks)
    told = joined.non_tensor_batch["reward_extra_info"].tolist()
    assert told == [{"read": "x"}, {"read": "y"}, {"size": "x"}, {"size": "y"}]
    assert joined.meta_info == {"timing": {"images": 4.0}}
    assert joined.batch["prompt_embeds"].shape == (4, 4, 3) and joined.batch["prompt_embeds"][0, 2:].sum() == 0


def test_images_of_different_sizes_from_two_workers_stay_as_they_are():
    def scored(sides, score):
        outputs = [DiffusionAgentLoopOutput(torch.full((3, *side), 7, dtype=torch.uint8), [], {}) for side in sides]
        for output in outputs:
            output.reward_score = score
        result = collate(outputs)
        result.meta_info["timing"] = {"rewards": 0.0}
        return result

    small, wide, mixed = [(4, 4)] * 2, [(4, 6)] * 2, [(4, 4), (6, 4)]
    for sides in ([small, wide], [small, mixed], [mixed, wide]):
        joined = join([scored(one, number) for number, one in enumerate(sides)])
        found = [tuple(one.shape[1:]) for one in joined.non_tensor_batch["responses"]]
        assert found == [side for one in sides for side in one] and "responses" not in joined.batch.keys()
        assert all((one == 7).all() for one in joined.non_tensor_batch["responses"]), "nothing is filled up"
        assert joined.batch["rm_scores"].flatten().tolist() == [0, 0, 1, 1]
    assert join([scored(small, 0), scored(small, 1)]).batch["responses"].shape == (4, 3, 4, 4)


def test_the_best_and_the_worst_of_a_group_are_written(tmp_path):
    """Rows 0 to 3 are one group that is kept; a score that is missing is neither; of the others nothing is written."""
    data = batch(["mine"] * 6)
    data.non_tensor_batch["keep_to"] = object_array([str(tmp_path / "00000")] * 4 + [None] + [str(tmp_path / "cut")])
    scores = {"0": 0.5, "1": 0.9, "2": float("nan"), "3": 0.1, "4": 2.0, "5": -2.0}

    async def judge(ground_truth):
        return scores[ground_truth]

    output = run(data, judge, on_failure="drop", n=4)
    assert list(output.non_tensor_batch["written"]) == [
        *(None, {"image": "00000_best.png"}, None, {"image": "00000_worst.png"}, None, None)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000_best.png", "00000_worst.png"]
    assert "returned nan" in output.non_tensor_batch["reward_failure"][2]
