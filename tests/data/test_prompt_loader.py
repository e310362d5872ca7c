import itertools
import json
from collections import Counter

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from verl_omni.data import PromptDataset, create_dataloader, steps_for_epochs
from verl_omni.data.prompt_loader import EpochStream


class Numbers(Dataset):
    """Prompts reduced to their numbers."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"index": index}


def batches(stream, count):
    return list(itertools.islice(stream, count))


def numbers(iterator, count):
    return [batch["index"].tolist() for batch in itertools.islice(iterator, count)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("prompts, size", [(10, 3), (7, 7), (7, 5), (12, 4), (5, 1), (11, 10), (1, 1)])
def test_every_epoch_holds_every_prompt_once_and_no_batch_a_prompt_twice(prompts, size, shuffle):
    epochs = 2 * size  # a whole number of batches
    seen = batches(EpochStream(prompts, size, shuffle, seed=3), prompts * epochs // size)
    assert all(len(batch) == size == len(set(batch)) for batch in seen)
    flat = [i for batch in seen for i in batch]
    for start in range(0, len(flat), prompts):
        assert sorted(flat[start : start + prompts]) == list(range(prompts))
    counts = Counter(flat)
    assert set(counts.values()) == {epochs}


def test_order_depends_on_the_seed_alone():
    first = batches(EpochStream(20, 6, True, seed=0), 30)
    assert first == batches(EpochStream(20, 6, True, seed=0), 30)
    assert first != batches(EpochStream(20, 6, True, seed=1), 30)
    epochs = [i for batch in first for i in batch]
    assert epochs[:20] != epochs[20:40]
    assert batches(EpochStream(5, 3, False, seed=0), 4) == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 17])
def test_an_interrupted_run_sees_what_an_uninterrupted_one_sees(stop, workers):
    def loader():
        return create_dataloader(Numbers(10), batch_size=3, seed=5, num_workers=workers)

    whole = numbers(iter(loader()), 25)

    first = loader()
    before = numbers(iter(first), stop)
    state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    assert before + numbers(iter(second), 25 - stop) == whole


def test_a_twice_interrupted_run_too():
    whole = numbers(iter(create_dataloader(Numbers(10), 4)), 12)
    state, seen = None, []
    for count in (5, 2, 5):
        loader = create_dataloader(Numbers(10), 4)
        if state:
            loader.load_state_dict(state)
        seen += numbers(iter(loader), count)
        state = loader.state_dict()
    assert seen == whole


def test_a_state_of_another_order_is_refused():
    state = create_dataloader(Numbers(10), 4, seed=1).state_dict()
    with pytest.raises(ValueError, match="data.train_batch_size was 4 and is 5; data.seed was 1 and is 2"):
        create_dataloader(Numbers(10), 5, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="number of prompts was 10 and is 9"):
        create_dataloader(Numbers(9), 4, seed=1).load_state_dict(state)


SAMPLERS = {
    "subset": lambda: SequentialSampler(range(4)),
    "random": lambda: RandomSampler(range(10)),
    "random, own generator": lambda: RandomSampler(range(10), generator=torch.Generator().manual_seed(3)),
    "weighted": lambda: WeightedRandomSampler([1.0, 9.0, 5.0, 0.0], num_samples=7),
    "told the epoch": lambda: DistributedSampler(range(10), num_replicas=2, rank=1, seed=4),
    "endless": lambda: itertools.count(0, 3),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_users_sampler_says_the_order_and_resumes(name, workers):
    size = 100 if name == "endless" else 10

    def loader(batch_size=3):
        return create_dataloader(Numbers(size), batch_size, seed=5, num_workers=workers, sampler=SAMPLERS[name]())

    whole = numbers(iter(loader()), 9)
    first = loader()
    before = numbers(iter(first), 4)
    state = first.state_dict()
    torch.manual_seed(0)  # a new process
    second = loader()
    second.load_state_dict(state)
    assert before + numbers(iter(second), 5) == whole
    with pytest.raises(ValueError, match="data.train_batch_size was 3 and is 2"):
        loader(2).load_state_dict(state)
    with pytest.raises(ValueError, match="train_sampler was [A-Za-z]+ and is None"):
        create_dataloader(Numbers(size), 3, seed=5).load_state_dict(state)


def test_a_users_sampler_is_taken_at_its_word():
    flat = [i for batch in numbers(iter(create_dataloader(Numbers(10), 3, sampler=[7, 7, 2, 9])), 4) for i in batch]
    assert flat == [7, 7, 2, 9] * 3
    one, other = (
        numbers(iter(create_dataloader(Numbers(10), 5, seed=seed, sampler=RandomSampler(range(10)))), 4)
        for seed in (0, 1)
    )
    assert sorted(one[0] + one[1]) == sorted(one[2] + one[3]) == list(range(10))
    assert one[:2] != one[2:] and one != other
    with pytest.raises(ValueError, match=r"train_sampler \(list\) gives no prompt at all"):
        next(iter(create_dataloader(Numbers(10), 3, sampler=[])))


def test_batch_larger_than_the_data_is_an_error_that_says_what_to_set(tmp_path):
    row = {"data_source": "ocr", "prompt": "x", "reward_model": {"ground_truth": "x"}}
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 5)
    data = PromptDataset(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"train_batch_size=6 is larger .*\(5\): set data.train_batch_size=5 or less"):
        create_dataloader(data, 6)
    with pytest.raises(ValueError, match="train_batch_size=0: expected 1 or more"):
        create_dataloader(data, 0)
    assert len(next(iter(create_dataloader(data, 5)))["prompt"]) == 5


def test_steps_for_epochs_shows_every_prompt_often_enough():
    for prompts, size, epochs in [(10, 3, 1), (10, 3, 3), (12, 4, 5), (7, 7, 2)]:
        steps = steps_for_epochs(prompts, size, epochs)
        counts = Counter(i for batch in batches(EpochStream(prompts, size, True, 0), steps) for i in batch)
        fewer = Counter(i for batch in batches(EpochStream(prompts, size, True, 0), steps - 1) for i in batch)
        assert min(counts.values()) >= epochs > min(fewer.get(i, 0) for i in range(prompts))
