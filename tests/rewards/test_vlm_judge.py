"""The reward `vlm_judge`: what it asks, how answers are read, and that what cannot be read is never a score."""

import asyncio
import base64
import io
import json
import math
import wave

import numpy as np
import pytest
import torch
from PIL import Image
from reward_servers import answering, picture

from verl_omni.rewards import check_settings, make_scorer
from verl_omni.rewards.choice import Choice
from verl_omni.rewards.reward_function import RewardError
from verl_omni.rewards.scorers.vlm_judge import TEMPLATES, find_json, find_number
from verl_omni.rewards.scoring import as_reward_function
from verl_omni.rewards.serving.client import RewardServerError
from verl_omni.utils.responses import KINDS, Sound, VideoWithSound


def says(text: str, finish: str = "stop"):
    answer = {"choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}]}
    return 200, {}, json.dumps(answer).encode()


def likely(words: dict[str, float]):
    """A chat completion of one token, with OpenAI's logprobs."""
    tokens = [{"token": word, "logprob": math.log(p), "bytes": None} for word, p in words.items()]
    logprobs = {"content": [{**tokens[0], "top_logprobs": tokens}]}
    message = {"role": "assistant", "content": tokens[0]["token"]}
    choice = {"index": 0, "finish_reason": "length", "message": message, "logprobs": logprobs}
    return 200, {}, json.dumps({"choices": [choice]}).encode()


def judge(address: str, **settings):
    settings = {"address": f"{address}/v1", "model": "m", "retries": 0, **settings}
    check_settings("vlm_judge", settings)
    return make_scorer("vlm_judge", settings)


def ask(answer, image=None, prompt: str = "a cat", truth=None, **settings) -> tuple[dict, list[dict]]:
    """The score, and the requests."""
    asked = []

    def recorded(request):
        asked.append(request)
        return answer(len(asked)) if callable(answer) else answer

    with answering(recorded) as address:
        (score,) = judge(address, **settings)([image or picture(0)], [truth], [prompt], [{}])
    return score, asked


OWN = {"template": "How good is {prompt}?", "parser": "number", "scale": "0..10"}


# ---- what is asked -------------------------------------------------------------------------------------


def pixels(part: dict) -> np.ndarray:
    head, data = part["image_url"]["url"].split(",")
    assert part["type"] == "image_url" and head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_the_question(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k")
    image = picture(3)
    score, (request,) = ask(says("7"), image, "a {ground_truth} \\1", token_env="JUDGE_KEY", max_tokens=30, **OWN)
    assert score == {"score": pytest.approx(0.7), "judge": "7"}
    assert request["path"] == "/v1/chat/completions" and request["headers"]["Authorization"] == "Bearer k"
    (message,) = request["body"].pop("messages")
    assert request["body"] == {"model": "m", "temperature": 0.0, "max_tokens": 30}
    seen, text = message["content"]
    assert np.array_equal(pixels(seen), np.asarray(image))
    assert message["role"] == "user" and text == {"type": "text", "text": "How good is a {ground_truth} \\1?"}


def test_a_video_is_shown_in_frames():
    video = [picture(seed) for seed in range(9)]
    _, (request,) = ask(says("7"), video, frames=3, **OWN)
    *seen, text = request["body"]["messages"][0]["content"]
    assert [pixels(part).tolist() for part in seen] == [np.asarray(video[i]).tolist() for i in (1, 4, 7)]


def test_a_video_with_sound_is_shown_and_played():
    """The whole body, by OpenAI's own types, and the sound as the standard library reads it."""
    pydantic = pytest.importorskip("pydantic")
    openai = pytest.importorskip("openai.types.chat.completion_create_params")
    tone = Sound(0.5 * torch.sin(torch.arange(800) / 3).expand(2, -1), 8000)
    made, asked = VideoWithSound(torch.randint(0, 256, (9, 3, 6, 8), dtype=torch.uint8), tone, 12.0), []

    def recorded(body):
        asked.append(body)
        return says("It fits.\nFinal Score: 4")

    with answering(recorded) as address:
        settings = {"address": f"{address}/v1", "model": "m", "retries": 0, "frames": 3, "listens": True}
        choice = Choice("judge", "vlm_judge", settings=settings | {"template": "video_with_sound"})
        function = as_reward_function(None, choice)
        function.check_takes(KINDS["video with sound"])
        sample = {"data_source": "x", "response": made, "prompt": "a drum", "ground_truth": None, "extra_info": {}}
        (answer,) = asyncio.run(function.score([sample]))
    assert answer["score"] == 0.75
    body = asked[0]["body"]
    pydantic.TypeAdapter(openai.CompletionCreateParamsNonStreaming).validate_python(body, strict=True)
    *frames, sound, text = body["messages"][0]["content"]
    expected = made.frames[[1, 4, 7]].permute(0, 2, 3, 1).numpy()
    assert np.array_equal(np.stack([pixels(part) for part in frames]), expected)
    assert sound["type"] == "input_audio" and sound["input_audio"]["format"] == "wav"
    with wave.open(io.BytesIO(base64.b64decode(sound["input_audio"]["data"]))) as file:
        assert file.getparams()[:4] == (2, 2, 8000, 800)
    assert "Caption: a drum" in text["text"]


def test_a_judge_that_listens_is_refused_where_there_is_no_sound():
    settings = {"address": "http://127.0.0.1:9/v1", "model": "m", "listens": True}
    function = as_reward_function(None, Choice("judge", "vlm_judge", settings=settings))
    with pytest.raises(RewardError, match='"judge" asks for audios, and what the model makes is video: that'):
        function.check_takes(KINDS["video"])
    deaf = as_reward_function(None, Choice("judge", "vlm_judge", settings=settings | {"listens": False}))
    for name in ("image", "video", "video with sound"):
        deaf.check_takes(KINDS[name])
    with pytest.raises(RewardError, match='"judge" asks for images, and what the model makes is sound'):
        deaf.check_takes(KINDS["sound"])


def test_the_ground_truth_is_filled_in():
    own = OWN | {"template": "Does it show {ground_truth}? 0 to 10."}
    _, (request,) = ask(says("7"), truth="two dogs", **own)
    assert request["body"]["messages"][0]["content"][-1]["text"] == "Does it show two dogs? 0 to 10."
    with pytest.raises(ValueError, match="asks for the ground truth, and it is None"):
        ask(says("7"), **own)


@pytest.mark.parametrize("name", [name for name, template in TEMPLATES.items() if template.parser == "number"])
def test_the_templates_read_what_they_ask_for(name):
    form = TEMPLATES[name].text.splitlines()[-1]  # "Final Score: <number>", "<Score>number</Score>"
    answer = form.replace("<number>", "4").replace("number", "4")
    score, (request,) = ask(says(f"Sharp, 3 dogs of 5.\n{answer}"), template=name)
    assert score["score"] == 0.75
    assert ("a cat" in request["body"]["messages"][0]["content"][-1]["text"]) == (name != "qwen_vl")


# ---- how answers are read ------------------------------------------------------------------------------

NUMBERS = {
    "4": 4,
    " 3.5\n": 3.5,
    "I would say 2.": 2,
    "-1": -1,
    "Score: 4/5": 4,
    "**Final Score:** 4.5": 4.5,
    "<Score>3</Score>": 3,
    "dog (object): Score: 2\ncolour: Score: 5\nFinal Score: 4": 4,
    "on a score from 1 to 5: Score = 4": 4,
    "Final score: 2 ... no, Final Score: 3": 3,
    "Score: 4. Yes, score: 4": 4,
}


def test_numbers():
    assert {text: find_number(text) for text in NUMBERS} == NUMBERS
    for text in ("great", "4 out of 5", "Score: 3, Score: 4", "Score: high", ""):
        with pytest.raises(ValueError, match="number"):
            find_number(text)


def test_json():
    for text in (
        '{"score": 4}',
        '```json\n{"why": "a {b}", "score": 4}\n```',
        'So: {"parts": {"score": 1}, "score": 4}.',
    ):
        assert find_json(text) == 4
    for text in ("4", "{", '{"score": "4"}', '{"score": true}', '{"a": 1} {"score": 4}', '{"a": {"score": 4}', "[4]"):
        with pytest.raises(ValueError, match="one JSON object"):
            find_json(text)
    score, _ = ask(says('{"score": 8}'), template="Rate it.", parser="json", scale="raw")
    assert score["score"] == 8
    score, _ = ask(says("1"), template="Faults of it?", parser="number", scale="5..0")
    assert score["score"] == pytest.approx(0.8), "the best is 0 faults"


def test_yes_and_no():
    words = {"Yes": 0.5, " yes": 0.1, "No": 0.2, "NO": 0.05, "Maybe": 0.15}
    score, (request,) = ask(likely(words), template="shows_prompt")
    assert score == {"score": pytest.approx(0.6 / 0.85), "p_yes": pytest.approx(0.6), "p_no": pytest.approx(0.25)}
    asked = {key: request["body"][key] for key in ("max_tokens", "logprobs", "top_logprobs")}
    assert asked == {"max_tokens": 1, "logprobs": True, "top_logprobs": 20}
    score, _ = ask(likely({"No": 0.9, "Never": 0.001}), template="shows_prompt")
    assert score["score"] == 0


UNREADABLE = {
    "nothing": (says(""), OWN, "the judge said nothing"),
    "prose": (says("It is\nlovely. " + "x" * 500), OWN, 'no number; the judge said "It is lovely. xxx'),
    "off the scale": (says("11"), OWN, '11 is not on the scale 0..10; the judge said "11"'),
    "not finite": (says('{"score": NaN}'), OWN | {"parser": "json"}, "nan is no finite number"),
    "cut off": (says("Score: 1", "length"), OWN, 'cut off, raise max_tokens; it said "Score: 1"'),
    "no completion": ((200, {}, b'{"object": "list"}'), OWN, "expected a chat completion with one choice"),
    "no content": ((200, {}, b'{"choices": [{"message": {"content": null}}]}'), OWN, "the judge said nothing"),
    "no probabilities": (
        says("Yes"),
        {"template": "shows_prompt"},
        "no top_logprobs, which parser=yes_no_logits needs",
    ),
    "other words": (likely({"Sure": 0.9, "Maybe": 0.1}), {"template": "shows_prompt"}, "sure 0.9, maybe 0.1"),
    "in doubt": (likely({"Sure": 0.8, "No": 0.1, "Hm": 0.05}), {"template": "shows_prompt"}, "expected Yes and No"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_asked_again_and_never_a_score(name):
    answer, settings, said = UNREADABLE[name]
    with pytest.raises(RewardServerError, match="no score after 3 tries") as error:
        ask(answer, retries=2, **settings)
    line = str(error.value)
    assert said in line and "\n" not in line and len(line) < 500
    good = likely({"Yes": 0.7, "No": 0.3}) if "template" in settings and settings is not OWN else says("7")
    good = says('{"score": 7}') if settings.get("parser") == "json" else good
    score, asked = ask(lambda count: good if count == 3 else answer, retries=2, **settings)
    assert score["score"] == pytest.approx(0.7) and len(asked) == 3


# ---- settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"template": "unifed_reward"}, 'unknown template "unifed_reward": did you mean "unified_reward"?'),
        ({"template": "How good is {caption}?"}, "the template has {caption}: expected {prompt} and {ground_truth}"),
        ({"template": "How good?"}, "a template of your own needs a parser"),
        ({"template": "How good?", "parser": "number"}, "parser=number needs a scale"),
        ({"template": "qwen_vl", "parser": "json"}, "template=qwen_vl has a parser of its own: leave out parser=json"),
        ({"template": "shows_prompt", "scale": "0..1"}, "scale=0..1 has no effect with parser=yes_no_logits"),
        ({"template": "shows_prompt", "max_tokens": 5}, "max_tokens=5 has no effect with parser=yes_no_logits"),
        ({"scale": "1-5"}, 'scale="1-5": expected the worst and the best, such as "1..5", or raw'),
        ({"scale": "3..3"}, 'scale="3..3": expected'),
        ({"temperature": -1.0}, "temperature=-1.0: expected 0 or more"),
        ({"parser": "words"}, 'unknown reward.scorers.vlm_judge.parser "words"'),
    ],
)
def test_settings_that_make_no_sense(settings, said):
    with pytest.raises(ValueError) as error:
        judge("http://localhost:1", **settings)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_settings_as_hydra_reads_them():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    typed = ["scale=1..5", "address=http://a:1/v1 http://b:2/v1", "template='How good is {prompt}?'"]
    values = [override.value() for override in OverridesParser.create().parse_overrides(typed)]
    assert values == ["1..5", "http://a:1/v1 http://b:2/v1", "How good is {prompt}?"]
