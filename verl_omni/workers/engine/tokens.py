"""What a forward of policy gradient computes of a tokens segment: stored texts, token by token, evaluated again."""

from collections.abc import Mapping

import numpy as np
import torch

from verl_omni.workers import columns
from verl_omni.workers.engine.replay import Batch, MicroBatch, Replay, Replays


class Tokens(Replay):
    """Of a micro-batch all texts begin in one column. Padding is on both sides, and nothing sees it."""

    per = "token"
    outputs = frozenset({"log_probs", "entropy"})

    def __init__(self, engine: Replays, temperature: float):
        self.engine, self.temperature = engine, temperature

    def pairs(self, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """A text goes through the model as a whole."""
        rows = torch.arange(len(data["text_ids"]))
        return rows, torch.zeros_like(rows)

    def _of_one_kind(self, data: Batch, rows: torch.Tensor) -> list[torch.Tensor]:
        return [torch.arange(len(rows))]

    def take(self, data: Batch, part: MicroBatch) -> dict[str, torch.Tensor]:
        rows = part.rows.tolist()
        prompts, texts = ([data[name][row] for row in rows] for name in ("text_prompt_ids", "text_ids"))
        left, right = (max(map(len, ids)) for ids in (prompts, texts))
        ids = torch.zeros(len(rows), left + right, dtype=torch.long, device=self.engine.device)
        real = torch.zeros_like(ids, dtype=torch.bool)
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            whole = slice(left - len(prompt), left + len(text))
            ids[i, whole], real[i, whole] = torch.cat([prompt, text]), True
        batch = {"input_ids": ids, "attention_mask": real, "text_mask": real[:, left:]}
        for name in ("text_log_probs", "text_old_log_probs"):
            if name in data:
                batch[name] = padded([data[name][row] for row in rows], right).to(ids.device)
        if "text_nucleus" in data:
            batch["text_nucleus"] = padded([data["text_nucleus"][row] for row in rows], right, 255).to(ids.device)
        if "text_positions" in data:
            batch["text_positions"] = torch.zeros(3, *ids.shape, dtype=torch.long, device=ids.device)
            for i, row in enumerate(rows):
                start = left - len(prompts[i])
                own = data["text_positions"][row]
                batch["text_positions"][:, i, start : start + len(own)] = own.T
        if "advantages" in data:  # one for all that a sample is made of
            batch["advantages"] = data["advantages"][part.rows.to(data["advantages"].device), 0]
        return batch

    def model_outputs(self, micro_batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """log_probs and entropy (N, K) of N texts of up to K tokens; without dropout, as they were written."""
        module, real = self.engine.module.eval(), micro_batch["attention_mask"]
        length = micro_batch["text_mask"].shape[1]
        logits = module(
            input_ids=micro_batch["input_ids"],
            attention_mask=real.long(),
            position_ids=micro_batch.get("text_positions", (real.long().cumsum(1) - 1).clamp_min(0)),
            logits_to_keep=length + 1,
            use_cache=False,
        ).logits[:, -(length + 1) : -1]  # some models keep them all, whatever they are told
        log_probs = token_log_probs(logits, self.temperature, micro_batch.get("text_nucleus"))
        written = micro_batch["input_ids"][:, -length:]
        with torch.no_grad():
            entropy = torch.special.entr(log_probs.exp()).sum(-1)
        return {"log_probs": log_probs.gather(-1, written[..., None])[..., 0], "entropy": entropy}


def token_log_probs(logits: torch.Tensor, temperature: float, nucleus: torch.Tensor | None = None) -> torch.Tensor:
    """(..., V) of every token, in float32; those outside of the nucleus (packed bits) have none."""
    logits = logits.float() / temperature
    if nucleus is not None:
        logits = logits.masked_fill(~unpacked(nucleus, logits.shape[-1]), -torch.inf)
    return logits.log_softmax(-1)


def packed(mask: torch.Tensor) -> torch.Tensor:
    """Booleans (..., V) as bits."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy(), axis=-1)).to(mask.device)


def unpacked(bits: torch.Tensor, count: int) -> torch.Tensor:
    places = torch.arange(7, -1, -1, device=bits.device, dtype=torch.uint8)
    return ((bits[..., None] >> places) & 1).flatten(-2)[..., :count].bool()


def padded(rows: list[torch.Tensor], length: int, value: float = 0.0) -> torch.Tensor:
    """(N, length, ...), filled up behind each."""
    whole = rows[0].new_full((len(rows), length, *rows[0].shape[1:]), value)
    for i, row in enumerate(rows):
        whole[i, : len(row)] = row
    return whole


def text_columns(data: Mapping[str, torch.Tensor | columns.Ragged]) -> Batch:
    """What of a mini-batch concerns its texts. A text counts as much as the steps of its sample do."""
    own = {name: value for name, value in data.items() if columns.of(name).per == "token" or name == "advantages"}
    if "share" in data:
        own["share"] = data["share"].reshape(len(data["share"]), -1).sum(1)
    return own
