"""The contract of a reward server as OpenAPI: what `/openapi.json` says of a request and its answers."""

from typing import Any

from verl_omni.rewards.serving.contract import PICTURES

FILE = {"type": "string", "contentEncoding": "base64"}
TENSOR = (
    "a safetensors file in base64 with one tensor, uint8 or floats in [0, 1]: channels x height x width, or a video "
    "with frames first"
)
SAMPLE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "image": FILE | {"description": "a PNG, JPEG or WebP file in base64"},
        "frames": {"type": "array", "minItems": 1, "items": FILE, "description": "a video: a list of such files"},
        "tensor": FILE | {"description": TENSOR},
        "prompt": {"type": "string"},
        "ground_truth": {"description": "anything that the scorer reads"},
        "extra_info": {"type": ["object", "null"]},
    },
    "oneOf": [{"required": [picture]} for picture in PICTURES],
    "additionalProperties": False,
}
REQUEST: dict[str, Any] = {
    "type": "object",
    "properties": {"samples": {"type": "array", "minItems": 1, "items": SAMPLE}},
    "required": ["samples"],
}
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "scores": {
            "type": "array",
            "description": "one for each sample, in their order",
            "items": {"type": "object", "properties": {"score": {"type": "number"}}, "required": ["score"]},
        }
    },
    "required": ["scores"],
}
DETAIL: dict[str, Any] = {
    "type": "object",
    "properties": {"detail": {"type": "string", "description": "one line"}},
    "required": ["detail"],
}
ERRORS = {
    401: "the token is missing or wrong",
    404: "there is no such scorer",
    408: "the body did not come in time",
    413: "too large",
    422: "the request cannot be read, or the scorer refuses a sample",
    500: "the scorer failed",
    503: "too many are here already: come back after Retry-After seconds",
}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


#: for FastAPI's `openapi_extra` and `responses`
BODY = {"requestBody": {"required": True, "content": _json(REQUEST)}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "the scores", "content": _json(ANSWER)},
    **{status: {"description": words, "content": _json(DETAIL)} for status, words in ERRORS.items()},
}
