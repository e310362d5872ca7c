"""Trajectories lie where they were made, or in the object store; several experiences at once."""

import dataclasses

import pytest
import ray
import torch
from verl.protocol import DataProto

from verl_omni.utils.arrays import object_array
from verl_omni.workers import columns
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.server import was_started_again
from verl_omni.workers.rollout.trajectories import (
    COLUMN,
    Several,
    TrajectoryRef,
    TrajectoryStore,
    in_two_parts,
    with_more,
)


@pytest.fixture(scope="module")
def cluster():
    ray.shutdown()  # one that another test left
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


def drawn(number: float, text_tokens: int = 2) -> RolloutOutput:
    trajectory = {
        "final_latents": torch.full((3,), number),
        "all_latents": torch.full((2, 3), number),
        "all_timesteps": torch.full((1,), number),
        "rollout_log_probs": torch.full((1,), number),
    }
    return RolloutOutput(torch.zeros(3, 4, 4), trajectory, {"prompt_embeds": torch.ones(text_tokens, 5)}, version=6)


def batch_of(*outputs: RolloutOutput) -> DataProto:
    return DataProto.from_dict(
        {"sample_id": torch.arange(len(outputs))}, {COLUMN: object_array([o.reference for o in outputs])}
    )


def test_what_is_printed_of_an_answer_has_no_tensors():
    """Wherever asyncio or Ray put it into a line, nobody would wait for all the numbers of a trajectory."""
    shown = repr(RolloutOutput(torch.zeros(3, 4, 4), {"a": torch.zeros(2)}, {"b": torch.zeros(2)}, version=6))
    assert shown == "RolloutOutput(modality='image', version=6, reference=None)"


def test_the_driver_sees_a_few_numbers_and_a_reference():
    answer = TrajectoryStore().keep("e0/1", drawn(1.0))
    assert set(answer.trajectory) == {"all_timesteps", "rollout_log_probs"} and not answer.conditions
    assert answer.version == 6 and answer.reference.key == "e0/1"


def test_what_is_kept_comes_back_stacked_in_the_order_that_is_asked_for():
    store = TrajectoryStore()
    one, two = store.keep("e0/0", drawn(1.0, text_tokens=2)), store.keep("e0/1", drawn(2.0, text_tokens=4))
    rows = store.batch(batch_of(two, one))
    both, first = torch.tensor([0, 1]), torch.tensor([1])
    assert rows["all_latents"][both][:, 0, 0].tolist() == [2.0, 1.0]
    assert rows["prompt_embeds"][both].shape == (2, 4, 5) and rows["prompt_embeds"][both][1, 2:].sum() == 0
    assert rows["prompt_embeds"][first].shape == (1, 4, 5), "as long as the longest, whoever is taken together"
    assert "final_latents" not in rows  # with stored steps nobody trains on the end


def test_without_stored_steps_the_end_is_what_is_kept():
    store = TrajectoryStore()
    answer = store.keep("e0/0", RolloutOutput(torch.zeros(3, 4, 4), {"final_latents": torch.ones(3)}))
    assert set(store.batch(batch_of(answer))) == {"final_latents"}


def test_one_experience_is_released_and_the_other_stays():
    store = TrajectoryStore()
    one, ten = store.keep("e1/0", drawn(1.0)), store.keep("e10/0", drawn(2.0))
    store.release("e1")
    assert store.batch(batch_of(ten))["all_latents"][0][0, 0] == 2.0
    with pytest.raises(KeyError, match="e1/0"):
        store.batch(batch_of(one))


def test_a_driver_is_no_server_that_was_started_again(cluster):
    assert was_started_again() is False


def test_what_another_process_drew_is_fetched_once(cluster):
    """Results of a pass over the samples stay with them, wherever they were drawn."""
    answer, stored = ray.remote(num_returns=2)(in_two_parts).remote(drawn(3.0))
    answer = dataclasses.replace(ray.get(answer), reference=TrajectoryRef("e2/0", stored))
    assert set(answer.trajectory) == {"all_timesteps", "rollout_log_probs"} and not answer.conditions
    store, data = TrajectoryStore(), batch_of(answer)
    assert store.batch(data)["all_latents"][0][0, 0] == 3.0
    store.add(data, {"ref_prev_sample_mean": torch.ones(1, 1, 3)})
    assert store.batch(data)["ref_prev_sample_mean"][0].shape == (1, 3)
    store.release("e2")
    assert not store.rows


def test_another_process_replays_samples_and_gives_back_what_it_finds(cluster):
    """Of two samples of two requests each; what is compared with stays where it is."""
    here, there = TrajectoryStore(), TrajectoryStore()
    parts = [here.keep(f"e0/{i}", drawn(float(i))).reference for i in range(4)]
    rows = object_array([Several((parts[0], parts[1])), Several((parts[2], parts[3]))])
    own = DataProto(non_tensor_batch={COLUMN: rows})
    here.add(own, {"ref_prev_sample_mean": torch.zeros(2, 2, 3)})
    lent = DataProto(non_tensor_batch={COLUMN: here.lent(own, columns.is_replayed)})
    seen = there.batch(lent)
    assert set(seen) == {"all_latents", "prompt_embeds"}
    assert seen["all_latents"][torch.arange(4)][:, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    there.add(lent, {"teacher_prev_sample_mean": torch.tensor([[[5.0], [6.0]], [[7.0], [8.0]]])})
    answers = there.lent(lent, lambda name: name.startswith("teacher_"))
    found = here.batch(DataProto(non_tensor_batch={COLUMN: with_more(rows, answers)}))
    assert found["teacher_prev_sample_mean"][torch.arange(4)].flatten().tolist() == [5.0, 6.0, 7.0, 8.0]
    assert {"ref_prev_sample_mean", "all_latents"} <= set(found)
