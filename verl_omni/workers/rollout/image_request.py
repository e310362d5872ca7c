"""What may be asked of a rollout server over HTTP: OpenAI's image request, read into what validation would ask for."""

import dataclasses
import re
import secrets
from dataclasses import dataclass
from typing import Any

from verl_omni.config import DiffusionModelConfig, DiffusionPipelineConfig, DiffusionRolloutConfig, HttpConfig
from verl_omni.config.knob import MOST_SEED, walk
from verl_omni.config.rollout import validation_pipeline
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.settings import check_size, check_steps, validation_sampling
from verl_omni.utils.errors import Refused
from verl_omni.utils.hub import shown_name
from verl_omni.utils.json_bodies import loads
from verl_omni.utils.listening import is_loopback, token_in
from verl_omni.utils.responses import KINDS
from verl_omni.utils.suggest import unknown

HTTP = "actor_rollout_ref.rollout.http"
OPENAI = ("prompt", "model", "n", "size", "response_format")
GUIDANCE = ("true_cfg_scale", "guidance_scale", "guidance_scale_2", "audio_guidance_scale")
# A run may have more; nobody else is to hold a server for longer, or to get pixels that are no numbers.
MOST_STEPS, MOST_GUIDANCE = 100, 100.0


def http_token(http: HttpConfig) -> str | None:
    """The token that has to be sent. Beyond this machine there has to be one."""
    if http.token_file is None and not is_loopback(http.host):
        raise ValueError(
            f"{HTTP}.host={http.host} lets other machines in: name a file with a token for them in {HTTP}.token_file"
        )
    return None if http.token_file is None else token_in(http.token_file)


@dataclass
class ImageRequest:
    prompt: str
    negative_prompt: str
    seeds: range
    #: of all images: validation's, but for what the request says
    sampling: dict[str, Any]


class RequestReader:
    """Reads requests for one model. Whatever is wrong with one is said by `Refused`."""

    def __init__(self, config: DiffusionRolloutConfig, model: DiffusionModelConfig):
        self.config, self.model = config, model
        self.name = shown_name(model.path)
        self.adapter = DiffusionModelBase.get_class(model)
        own, shown = config.pipeline, validation_pipeline(config)
        self.knobs = {knob.name: knob for knob in walk(DiffusionPipelineConfig)}
        self.guidance = [name for name in GUIDANCE if name in self.adapter.pipeline_knobs(model)]
        self.fields = (*OPENAI, "seed", "num_inference_steps", "negative_prompt", *self.guidance)
        self.most_steps = max(MOST_STEPS, own.num_inference_steps, shown.num_inference_steps)
        self.most_pixels = config.http.max_pixels or max(own.height * own.width, shown.height * shown.width)
        self.most_images = min(config.http.max_images, config.max_num_seqs)  # one forward, and so one version

    def read(self, body: bytes | bytearray) -> ImageRequest:
        try:
            fields = loads(body)
        except ValueError as error:
            raise Refused(422, f"the body is no JSON ({error!s:.100})") from error
        if not isinstance(fields, dict):
            raise Refused(422, 'the body is no JSON object: expected {"prompt": "...", ...}')
        for name in fields:
            if name not in self.fields:
                raise Refused(422, unknown("field", name, self.fields))
        fields = {name: value for name, value in fields.items() if value is not None}
        prompt = _text(fields, "prompt")
        if prompt is None:
            raise Refused(422, 'there is no prompt: expected {"prompt": "...", ...}')
        if fields.get("model", self.name) != self.name:
            raise Refused(404, unknown("model", str(fields["model"]), [self.name]))
        if fields.get("response_format", "b64_json") != "b64_json":
            raise Refused(422, f"response_format={fields['response_format']}: this server has b64_json only")
        count = _whole(fields, "n", 1, least=1)
        if count > self.most_images:
            raise Refused(413, f"n={count!s:.40}: at most {self.most_images} images a request ({HTTP}.max_images)")
        seed = _whole(fields, "seed", secrets.randbelow(MOST_SEED - count), least=0, most=MOST_SEED + 1 - count)
        try:
            sampling = self._sampling(fields)
        except ValueError as error:
            raise Refused(422, str(error)) from error
        return ImageRequest(prompt, sampling["negative_prompt"], range(seed, seed + count), sampling)

    def _sampling(self, fields: dict[str, Any]) -> dict[str, Any]:
        over = self._size(fields) | {name: _number(fields, name) for name in self.guidance if name in fields}
        if "num_inference_steps" in fields:
            steps = over["num_inference_steps"] = _whole(fields, "num_inference_steps", None, least=1)
            if steps > self.most_steps:
                raise Refused(413, f"num_inference_steps={steps!s:.40}: at most {self.most_steps}")
        shown = validation_pipeline(self.config)
        for name, value in over.items():
            self.knobs[name].range.check(name, value)
            if name in self.guidance and value > (most := max(MOST_GUIDANCE, getattr(shown, name) or 0.0)):
                raise Refused(422, f"{name}={value!s:.40}: expected at most {most:g}")
        pipeline = dataclasses.replace(shown, **over)
        check_size("size: ", pipeline, self.model)
        if "num_inference_steps" in fields:
            check_steps("", pipeline, self.model)
        if "negative_prompt" in fields:
            over["negative_prompt"] = _text(fields, "negative_prompt")
            if self.adapter.cfg_scale(dataclasses.replace(self.model, pipeline=pipeline)) <= 1:
                raise ValueError(f"negative_prompt has no effect without guidance: set {' or '.join(self.guidance)}")
        return validation_sampling(self.config, self.model, **over)

    def _size(self, fields: dict[str, Any]) -> dict[str, int]:
        size = _text(fields, "size")
        if size is None:
            return {}
        if not KINDS[made := self.adapter.makes(self.model)].is_seen:
            raise Refused(422, f"size={size:.40}: this model makes {made}, which has none; leave it out")
        found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", size)
        if not found:
            raise Refused(422, f'size="{size:.40}": expected width x height in pixels, such as "512x512"')
        width, height = map(int, found.groups())
        if width * height > self.most_pixels:
            raise Refused(413, f"size={size}: at most {self.most_pixels} pixels ({HTTP}.max_pixels)")
        return {"width": width, "height": height}


def _text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise Refused(422, f"{name}={value!s:.40}: expected a text")
    return value


def _number(fields: dict[str, Any], name: str) -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(422, f"{name}={value!s:.40}: expected a number")
    return value


def _whole(fields: dict[str, Any], name: str, default: int | None, least: int, most: int | None = None) -> int:
    value = fields.get(name, default)
    if type(value) is not int or value < least or (most is not None and value > most):
        bound = "or more" if most is None else f"to {most}"
        raise Refused(422, f"{name}={value!s:.40}: expected a whole number, {least} {bound}")
    return value
