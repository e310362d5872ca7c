"""A model that sees, and may hear, as the judge: any server with OpenAI's chat completions, such as vLLM or SGLang."""

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from verl_omni.config.knob import Range
from verl_omni.rewards.images import pictures_of
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.serving.client import BadAnswer, Count, HttpClient, Retries, Seconds
from verl_omni.rewards.serving.contract import png
from verl_omni.utils.responses import Sound, wav_file
from verl_omni.utils.suggest import unknown

Parser = Literal["number", "yes_no_logits", "json"]

SHOWN = 200  # characters of what a judge said
TOP = 20  # tokens whose probability is asked for: the most that OpenAI and vLLM give by default
MOST_DOUBT = 0.01  # in a score, from the probability of an answer that is not among them


class Template(NamedTuple):
    """What the judge is asked, how its answer is read, and the worst and the best that it can say."""

    text: str
    parser: Parser | None
    scale: str | None


TEMPLATES = {
    # After UnifiedReward (arXiv 2503.05236): how well the caption is met and how good it looks, as one number.
    "unified_reward": Template(
        "This picture was generated from a caption. Judge it by two things: does it show everything that the caption "
        "asks for (objects, how many, colours, where they are, what they do), and is it well made (sharp, natural, "
        "without artefacts)?\nCaption: {prompt}\nWeigh both in a few sentences. Then give one number from 1 (misses "
        "the caption, or is spoilt) to 5 (shows all of it, and looks flawless), decimals allowed, in a last line of "
        "this form:\nFinal Score: <number>",
        "number",
        "1..5",
    ),
    # After the Qwen-VL judge of Flow-GRPO (arXiv 2505.05470): how good it looks, on five steps that are described.
    "qwen_vl": Template(
        "Rate how this picture looks, whatever it shows:\n1 - blurred, noisy or too dark; one cannot make out the "
        "subject\n2 - visible flaws in sharpness, light or colour; an awkward frame\n3 - clean but plain; an ordinary "
        "composition\n4 - sharp and well lit, with good colours and a clear subject\n5 - outstanding in clarity, in "
        "light, colour and composition\nThink it over in two sentences, then end with the step that fits best in this "
        "form:\n<Score>number</Score>",
        "number",
        "1..5",
    ),
    # After VideoAlign (arXiv 2501.13918): how frames look, how they move and how well the caption is met.
    "video_align": Template(
        "These are frames of one video, in their order, which was generated from a caption. Judge it by three things: "
        "does each frame look good (sharp, natural, without artefacts), is what moves from frame to frame smooth and "
        "possible, and does the video show what the caption asks for?\nCaption: {prompt}\nWeigh all three in a few "
        "sentences. Then give one number from 1 (spoilt, or misses the caption) to 5 (flawless, and shows all of it), "
        "decimals allowed, in a last line of this form:\nFinal Score: <number>",
        "number",
        "1..5",
    ),
    "video_with_sound": Template(
        "These are frames of one video, in their order, and its sound, which were generated from a caption. Judge them "
        "by three things: are frames and sound well made, does one hear what one sees, and do both show what the "
        "caption asks for?\nCaption: {prompt}\nWeigh all three in a few sentences. Then give one number from 1 "
        "(spoilt, or misses the caption) to 5 (flawless, and shows all of it), decimals allowed, in a last line of "
        "this form:\nFinal Score: <number>",
        "number",
        "1..5",
    ),
    # P(yes), after VQAScore (arXiv 2404.01291).
    "shows_prompt": Template(
        'Does this picture show "{prompt}"? Answer with one word, Yes or No.', "yes_no_logits", None
    ),
}


@register_reward("vlm_judge", reads=("prompt",))
class VlmJudge:
    """What ``model`` at ``address`` (such as http://host:8000/v1; replicas separated by commas) thinks of an image.

    ``template`` is a name in TEMPLATES, or a question of your own in which {prompt} and {ground_truth} are filled in.
    Your own needs a ``parser``: "number" reads the one number of the answer, or that after "Final Score" or "Score";
    "json" reads "score" of the one object in it; "yes_no_logits" looks at how likely the first tokens were instead,
    P(yes) / (P(yes) + P(no)). ``scale``, such as "1..5", is the worst and the best that the judge can say, which become
    0 and 1; "raw" leaves the number as it is. Of a video the judge sees ``frames`` frames, evenly spaced, and with
    ``listens`` it hears the sound.

    An answer that cannot be read is asked for again, and is an error after ``retries`` times; it is never a score.
    """

    def __init__(
        self,
        *,
        address: str,
        model: str,
        template: str = "unified_reward",
        parser: Parser | None = None,
        scale: str | None = None,
        token_env: str | None = None,
        frames: Count = 8,
        listens: bool = False,
        max_tokens: Count | None = None,
        temperature: Annotated[float, Range(least=0)] = 0.0,
        timeout: Seconds = 300.0,
        retries: Retries = 8,
        concurrency: Count = 16,
        breaker_after: Count = 5,
        breaker_pause: Seconds = 5.0,
    ):
        known = find_template(template)
        if known.parser and parser:
            raise ValueError(f"template={template} has a parser of its own: leave out parser={parser}")
        self.template, parser = known.text, parser or known.parser
        if parser is None:
            raise ValueError("a template of your own needs a parser: number, json or yes_no_logits")
        self.body = {"model": model, "temperature": temperature, "max_tokens": max_tokens or 512}
        if parser == "yes_no_logits":
            for name, value in (("scale", scale), ("max_tokens", max_tokens)):
                if value is not None:
                    raise ValueError(f"{name}={value} has no effect with parser=yes_no_logits: leave it out")
            self.body |= {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP}
            self.read = read_yes_no
        else:
            scale = scale or known.scale
            if scale is None:
                raise ValueError(f'parser={parser} needs a scale: the worst and the best, such as "1..5", or raw')
            self.read = partial(read_number, find={"number": find_number, "json": find_json}[parser], scale=ends(scale))
        self.frames, self.listens = frames, listens
        self.client = HttpClient(
            address,
            token_env=token_env,
            timeout=timeout,
            retries=retries,
            concurrency=concurrency,
            breaker_after=breaker_after,
            breaker_pause=breaker_pause,
        )

    @staticmethod
    def needs(settings: Mapping[str, Any]) -> tuple[str, ...]:
        return ("audios", "sample_rates") if settings.get("listens") else ()

    def __call__(
        self,
        images: list,
        ground_truths: list,
        prompts: list[str],
        extra_infos: list[dict],
        audios: list | None = None,
        sample_rates: list[int] | None = None,
    ) -> list[dict]:
        sounds: list[Sound | None] = [None] * len(images)
        if self.listens:
            if audios is None or sample_rates is None:
                raise ValueError("listens=true, and there is no sound: leave it out")
            sounds = [Sound(audio, rate) for audio, rate in zip(audios, sample_rates, strict=True)]
        questions = [fill(self.template, p, truth) for p, truth in zip(prompts, ground_truths, strict=True)]
        bodies = [partial(self._body, *one) for one in zip(images, sounds, questions, strict=True)]
        return self.client.ask_all("/chat/completions", bodies, self.read)

    def _body(self, image: Any, sound: Sound | None, question: str) -> bytes:
        pictures = pictures_of(image, self.frames)
        content = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures]
        if sound is not None:
            wav = base64.b64encode(wav_file(sound)).decode()
            content.append({"type": "input_audio", "input_audio": {"data": wav, "format": "wav"}})
        content.append({"type": "text", "text": question})
        return json.dumps(self.body | {"messages": [{"role": "user", "content": content}]}).encode()


def find_template(template: str) -> Template:
    """The one of that name, or the text itself, whose parser and scale are not known."""
    if template in TEMPLATES:
        return TEMPLATES[template]
    if re.fullmatch(r"[\w-]*", template):
        raise ValueError(f"{unknown('template', template, TEMPLATES)}; one of your own is a question of several words")
    for name in re.findall(r"{(\w+)}", template):
        if name not in ("prompt", "ground_truth"):
            raise ValueError(f"the template has {{{name}}}: expected {{prompt}} and {{ground_truth}} only")
    return Template(template, None, None)


def fill(template: str, prompt: str, ground_truth: Any) -> str:
    """Both at once: a prompt that has braces stays as it is."""
    if "{ground_truth}" in template and not isinstance(ground_truth, str):
        raise ValueError(f"the template asks for the ground truth, and it is {ground_truth!r:.100}: expected a text")
    given = {"prompt": prompt, "ground_truth": ground_truth}
    return re.sub(r"{(prompt|ground_truth)}", lambda match: given[match[1]], template)


def ends(scale: str) -> tuple[float, float] | None:
    """`"1..5"` as numbers; None for `raw`."""
    if scale == "raw":
        return None
    try:
        worst, best = map(float, scale.split(".."))
    except ValueError:
        worst = best = math.nan
    if not (math.isfinite(worst) and math.isfinite(best) and worst != best):
        raise ValueError(f'scale="{scale}": expected the worst and the best, such as "1..5", or raw')
    return worst, best


def data_url(image: Any) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def read_number(answer: Any, find: Callable[[str], float], scale: tuple[float, float] | None) -> dict[str, Any]:
    """The number that the judge says, on its scale."""
    choice = only_choice(answer)
    text = (choice.get("message") or {}).get("content")
    if not isinstance(text, str) or not text.strip():
        raise BadAnswer(f"the judge said nothing: {answer!r:.{SHOWN}}")
    said = " ".join(text.split())[:SHOWN]
    if choice.get("finish_reason") == "length":  # "Score: 1" may have been going to be "Score: 10"
        raise BadAnswer(f'the judge was cut off, raise max_tokens; it said "{said}"')
    try:
        number = find(text)
        if not math.isfinite(number):
            raise ValueError(f"{number} is no finite number")
        if scale is None:
            return {"score": number, "judge": said}
        worst, best = scale
        if not min(scale) <= number <= max(scale):
            raise ValueError(f"{number:g} is not on the scale {worst:g}..{best:g}")
    except ValueError as error:
        raise BadAnswer(f'{error}; the judge said "{said}"') from error
    return {"score": (number - worst) / (best - worst), "judge": said}


def find_number(text: str) -> float:
    """That after the last "Final Score", else that after every "Score", else the only one."""
    number = r"[+-]?\d+(?:\.\d+)?"
    final = re.findall(rf"final\s+score[^\w.+-]{{0,8}}({number})", text, re.IGNORECASE)[-1:]
    scores = final or re.findall(rf"score[^\w.+-]{{0,8}}({number})", text, re.IGNORECASE)
    found = {float(one) for one in scores or re.findall(number, text)}
    if len(found) != 1:
        raise ValueError("no number" if not found else 'more than one number, and none after "Final Score:"')
    return found.pop()


def find_json(text: str) -> float:
    """That under "score" of the one object in the answer, whatever stands around it."""
    try:
        score = json.loads(text[text.find("{") : text.rfind("}") + 1])["score"]
    except (ValueError, KeyError, RecursionError):
        score = None
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ValueError('expected one JSON object with a number under "score"')
    return float(score)


def read_yes_no(answer: Any) -> dict[str, Any]:
    """P(yes) / (P(yes) + P(no)) of the first token, in whatever spelling ("Yes", " yes").

    A word that is not among the likeliest tokens is less likely than the last of them, and counts as 0. Where that
    might move the score by more than a hundredth, it is an error.
    """
    choice = only_choice(answer)
    try:
        tokens = choice["logprobs"]["content"][0]["top_logprobs"]
        pairs = [(token["token"].strip().lower(), math.exp(token["logprob"])) for token in tokens]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise BadAnswer(f"no top_logprobs, which parser=yes_no_logits needs: {answer!r:.{SHOWN}}") from error
    yes, no = (math.fsum(p for word, p in pairs if word == wanted) for wanted in ("yes", "no"))
    least = min((p for _, p in pairs), default=math.inf)
    found = yes + no
    if not found or (not (yes and no) and least / (found + least) > MOST_DOUBT):
        said = ", ".join(f"{word} {p:.2g}" for word, p in pairs)
        raise BadAnswer(f"expected Yes and No among the judge's first words: {said:.{SHOWN}}")
    return {"score": yes / found, "p_yes": yes, "p_no": no}


def only_choice(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadAnswer(f"expected a chat completion with one choice: {answer!r:.{SHOWN}}")
    return choices[0]
