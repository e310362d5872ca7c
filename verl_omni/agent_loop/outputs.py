"""What agent loops give, and what becomes of it: columns of a batch, pictures worth keeping."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.utils.arrays import object_array
from verl_omni.utils.diversity import coarse
from verl_omni.utils.responses import Latents, Response, kind_of, write_response
from verl_omni.workers import columns
from verl_omni.workers.columns import concatenated, stacked
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.trajectories import COLUMN


@dataclass
class DiffusionAgentLoopOutput:
    """One sample: what was made, what training needs, and (once scored) its reward."""

    response: Response
    prompt_ids: list[int]
    fields: dict[str, torch.Tensor]
    #: the requests that are trained on, where they are others than the one that made the response; each counts the same
    trained: Sequence[RolloutOutput] = ()
    reference: Any = None  # to what training needs, where it is not in `fields`
    version: int = 0  # of the weights that made it
    reward_score: float | None = None
    reward_extra_info: dict[str, Any] = field(default_factory=dict)
    reward_failure: str | None = None  # why it has no score: that is NaN then
    told: dict[str, Any] = field(default_factory=dict)  # what its line in samples.jsonl says beside
    format: bool | None = None  # whether what a rewriter wrote is as it should be, where that counts
    image_time: float = 0.0
    score_time: float = 0.0


def best_and_worst(outputs: list[DiffusionAgentLoopOutput], rows: list[dict[str, Any]], whole: int) -> dict[int, str]:
    """Files for the image of each group that the reward likes best, and least, where a row says where (`keep_to`).

    Of a group of which others have a part, so that fewer than `whole` samples are here, nobody knows them.
    """
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if row.get("keep_to") is not None and outputs[i].reward_score is not None:
            groups.setdefault(row["keep_to"], []).append(i)
    files = {}
    for place, group in groups.items():
        members = [i for i in group if not np.isnan(outputs[i].reward_score)] if len(group) == whole else []
        if not members:
            continue
        files[max(members, key=lambda i: outputs[i].reward_score)] = f"{place}_best"
        files.setdefault(min(members, key=lambda i: outputs[i].reward_score), f"{place}_worst")
    return files


def steps_of(answers: list[RolloutOutput]) -> dict[str, torch.Tensor]:
    """What the driver has of one sample that several requests made: their steps, one after the other."""
    first, *others = [one.trajectory for one in answers]
    per_sample = [name for name in first if columns.of(name).per == "sample"]
    alike = all(torch.equal(first[name], other[name]) for name in per_sample for other in others)
    as_many = all(first[name].shape[:1] == other[name].shape[:1] for name in first for other in others)
    if not (alike and as_many and all(one.reference is not None for one in answers)):
        raise ValueError(
            f"an agent loop names {len(answers)} requests to be trained on that are not alike: expected one size, one "
            "noise level and one number of trained steps for all requests of a sample"
        )
    return {
        name: value if name in per_sample else torch.cat([value, *(other[name] for other in others)])
        for name, value in first.items()
    }


def written(response: Response, file: Path) -> dict[str, Any]:
    """Write a sample's file: what its line in samples.jsonl says of it."""
    response = response.decoded if isinstance(response, Latents) else response
    kind, name = kind_of(response).name, write_response(response, file)
    if kind in ("image", "video"):
        return {"image": name} | ({"kind": kind} if kind == "video" else {})
    return {"kind": kind, "file": name} | ({"text": response} if kind == "text" else {})


def fields(outputs: list[DiffusionAgentLoopOutput]) -> dict[str, torch.Tensor]:
    """What training needs of each sample; `sample` alone (its place) where nothing was kept."""
    named = {name: stacked(name, [o.fields[name] for o in outputs]) for name in outputs[0].fields}
    ragged = [name for name, column in named.items() if not isinstance(column, torch.Tensor)]
    if ragged:
        raise ValueError(f"{', '.join(ragged)} of samples of several sizes do not stack: ask for references to them")
    return named or {"sample": torch.arange(len(outputs))}


def references(outputs: list[DiffusionAgentLoopOutput]) -> dict[str, np.ndarray]:
    """Which weights made each sample, and where its trajectory lies."""
    told = {"version": object_array([o.version for o in outputs])}
    if outputs[0].reference is not None:
        told[COLUMN] = object_array([o.reference for o in outputs])
    return told


def collate(outputs: list[DiffusionAgentLoopOutput], scores_only: bool = False) -> DataProto:
    scored = outputs[0].reward_score is not None
    tensors, non_tensors = {}, {"coarse": object_array([coarse(o.response) for o in outputs])}
    if not (scored and scores_only):
        responses = [o.response for o in outputs]
        if all(isinstance(r, torch.Tensor) and r.shape == responses[0].shape for r in responses):
            tensors["responses"] = torch.stack(responses)
        else:  # texts, or images of different sizes
            non_tensors["responses"] = object_array(responses)
            tensors["sample"] = torch.arange(len(outputs))
    if scored:
        tensors["rm_scores"] = torch.tensor([[o.reward_score] for o in outputs], dtype=torch.float32)
        # In one column of their own: a reward may give its numbers any name, `seed` and `uid` too.
        non_tensors["reward_extra_info"] = object_array([o.reward_extra_info for o in outputs])
        non_tensors["reward_failure"] = object_array([o.reward_failure for o in outputs])
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)


def side_by_side(images: DataProto, scores: DataProto) -> DataProto:
    """Both halves of the same rows as one batch."""
    timing = images.meta_info["timing"] | scores.meta_info["timing"]
    tensors = {k: half.batch[k] for half in (images, scores) for k in half.batch.keys()}
    non_tensors = images.non_tensor_batch | scores.non_tensor_batch
    return DataProto.from_dict(tensors, non_tensors, meta_info=scores.meta_info | {"timing": timing})


def loose(output: DataProto) -> DataProto:
    """With each response by itself, as `collate` leaves those of several sizes."""
    tensors = {name: value for name, value in output.batch.items() if name != "responses"}
    tensors["sample"] = torch.arange(len(output))
    non_tensors = output.non_tensor_batch | {"responses": object_array(list(output.batch["responses"]))}
    return DataProto.from_dict(tensors, non_tensors, meta_info=output.meta_info)


def join(outputs: list[DataProto]) -> DataProto:
    """Concatenate; text features of different length are padded to the longest."""
    if len(outputs) == 1:
        return outputs[0]
    pixels = [o.batch["responses"].shape[1:] if "responses" in o.batch.keys() else None for o in outputs]
    if len(set(pixels)) > 1:  # each worker's own are of one size, or none are pixels
        outputs = [loose(o) if shape else o for o, shape in zip(outputs, pixels, strict=True)]
    tensors = {k: concatenated(k, [o.batch[k] for o in outputs]) for k in outputs[0].batch.keys()}
    non_tensors = {k: np.concatenate([o.non_tensor_batch[k] for o in outputs]) for k in outputs[0].non_tensor_batch}
    timing = {k: max(o.meta_info["timing"][k] for o in outputs) for k in outputs[0].meta_info["timing"]}
    return DataProto.from_dict(
        tensors=tensors, non_tensors=non_tensors, meta_info=outputs[0].meta_info | {"timing": timing}
    )
