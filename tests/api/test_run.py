"""`verl_omni.Run`: what a run has left in its folder."""

import importlib.util
import json

import pytest
import torch

import verl_omni
from verl_omni.agent_loop.outputs import written

VIDEO = (torch.arange(3)[:, None, None, None] * 100).expand(3, 3, 16, 32).to(torch.uint8)


@pytest.mark.parametrize("ending", ["mp4", "gif"])
def test_a_video_of_validation_is_its_frames_whatever_its_file(tmp_path, monkeypatch, ending):
    if ending == "mp4":
        pytest.importorskip("av")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    folder = tmp_path / "validation/step_1"
    rows = [written(VIDEO, folder / "0"), written(VIDEO[1], folder / "1")]
    assert [row["image"] for row in rows] == [f"0.{ending}", "1.png"]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row | {"prompt": "a fox"}) + "\n" for row in rows))
    video, image = verl_omni.Run(tmp_path).images()
    assert [frame.size for frame in video] == [(32, 16)] * 3
    assert [frame.getpixel((5, 5))[0] for frame in video] == pytest.approx([0, 100, 200], abs=3)
    assert (image.size, image.getpixel((5, 5))) == ((32, 16), (100, 100, 100))
