"""Texts that vLLM writes: exact probabilities under the weights of the moment, and training that goes on from them."""

import os

import pytest
import torch
from test_texts import batch, requests, rewriter
from transformers import AutoModelForCausalLM

from verl_omni.utils.errors import RunError
from verl_omni.workers.rollout.vllm_rollout.texts import IN_PROCESS

SET_NUM_THREADS = torch.set_num_threads


@pytest.fixture(scope="module")
def writer(process_group, folder):
    return rewriter(str(folder), rollout="vllm")


def written(own, *args):
    with own.writing(0):
        return own.rollout.write_batch(requests(*args))


def check_log_probs(own, outputs, temperature: float = 1.0) -> None:
    """Of one text alone, in one pass of transformers' own model with the trained weights, in float64."""
    model = AutoModelForCausalLM.from_pretrained(own.config.path, dtype=torch.float64)
    model.load_state_dict(own.engine.module.state_dict())
    for output in outputs:
        prompt, text = output.trajectory["text_prompt_ids"], output.trajectory["text_ids"]
        with torch.no_grad():
            logits = model(torch.cat([prompt, text])[None]).logits[0, len(prompt) - 1 : -1] / temperature
        expected = torch.distributions.Categorical(logits=logits).log_prob(text).float()
        torch.testing.assert_close(output.trajectory["text_log_probs"], expected, atol=5e-6, rtol=0)


def test_probabilities_are_those_of_transformers_before_and_after_updates(writer):
    for step in range(3):
        outputs = written(writer)
        check_log_probs(writer, outputs)
        data = writer.with_old(batch(outputs))
        with writer.engine.train_mode():
            metrics = writer.train(data, first=True)
        assert metrics["ratio_max_dev"] == 0 and metrics["rollout_ratio_max_dev"] < 1e-5, step
        assert writer.train(data, first=False)["ratio_max_dev"] > 1e-3  # the weights have moved


def test_a_text_alone_is_the_same_text_and_a_seed_is_a_text(writer):
    together = written(writer)
    for request, beside_others in zip(requests(), together, strict=True):
        (alone,) = writer.rollout.write_batch([request])
        assert alone.trajectory["text_ids"].tolist() == beside_others.trajectory["text_ids"].tolist()
    assert len({o.response for o in together}) > 1


def test_the_likeliest_token(writer):
    greedy = written(writer, 0.0)
    model = writer.engine.module
    for output in greedy:
        prompt, text = output.trajectory["text_prompt_ids"], output.trajectory["text_ids"]
        with torch.no_grad():
            logits = model(torch.cat([prompt, text])[None]).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == text.tolist()


def test_a_text_ends_with_its_end_token(writer):
    """Which is a token that was chosen too, and trained."""
    own = writer.rollout
    (first,) = written(writer)[:1]
    before, own.ends = own.ends, [first.trajectory["text_ids"][2].item()]
    (ended,) = own.write_batch(requests()[:1])
    own.ends = before
    ids = first.trajectory["text_ids"].tolist()
    assert ended.trajectory["text_ids"].tolist() == ids[: ids.index(ids[2]) + 1]


def test_temperature(writer):
    check_log_probs(writer, written(writer, 0.7), 0.7)


def test_weights_that_are_not_all_there_are_an_error(writer):
    named = dict(writer.engine.module.named_parameters())
    named.pop("model.norm.weight")
    with pytest.raises(RunError, match="for 1 of its own, such as model.norm.weight"):
        writer.rollout.take(named.items())


def test_a_prompt_that_there_is_no_room_for(writer):
    long = requests()[0]
    long.prompt = "cat " * 600
    with pytest.raises(RunError, match="is longer than the 512 that there is room for; shorten it"):
        writer.rollout.write_batch([long])


def test_training_keeps_its_threads_and_its_environment(writer):
    assert torch.set_num_threads is SET_NUM_THREADS and not IN_PROCESS.keys() & os.environ.keys()
