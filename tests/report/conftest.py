import json
from pathlib import Path

import pytest
from PIL import Image

STEPS = 6


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of six steps with validations at 0, 3 and 6, as the trainer leaves it."""
    lines = [{"step": 0, "data": {"val-core/ocr/reward/mean@1": 0.544, "val-aux/ocr/exact/mean@1": 0.17}}]
    for step in range(1, STEPS + 1):
        data = {
            "critic/rewards/mean": 0.5 + step / 20,
            "actor/pg_clipfrac": 0.125,
            "actor/grad_norm": None,
            "timing_s/step": 10.0,
            "timing_s/gen": 4.0,
            "timing_s/update_actor": 3.5,
            "perf/total_num_images": 96,
        }
        if step % 3 == 0:
            data |= {"val-core/ocr/reward/mean@1": 0.6 + step / 20, "timing_s/testing": 2.0}
            data |= {"val-aux/ocr/exact/mean@1": step / 10}
        lines.append({"step": step, "data": data})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text("trainer:\n  note: <b>not bold</b>\n")
    for step in (0, 3, 10):
        folder = tmp_path / "validation" / f"step_{step}"
        folder.mkdir(parents=True)
        with (folder / "samples.jsonl").open("w") as samples:
            for index in range(4):
                Image.new("RGB", (32, 16), (step * 20, index * 60, 200)).save(folder / f"{index:05d}.png")
                sample = {
                    "index": index,
                    "prompt": f'a sign that reads "40{index}"',
                    "ground_truth": f"40{index}",
                    "score": 0.25 if step == 0 else 1.0,
                    "seed": index,
                    "image": f"{index:05d}.png",
                    "reward_extra_info": {"ocr_text": f"read{step}-{index}", "exact": float(step > 0)},
                }
                samples.write(json.dumps(sample) + "\n")
    return tmp_path
