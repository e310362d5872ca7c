"""`verl-omni models`, `algorithms`, `rewards`, `doctor` and `tiny`: what there is, and what is missing."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl_omni.cli import algorithms, doctor, main, models, rewards, tiny
from verl_omni.rewards import registry


def said(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["verl-omni", *arguments])
    main.main()
    return capsys.readouterr().out


def test_every_model_that_has_an_adapter_is_listed(monkeypatch, capsys):
    from verl_omni.pipelines.model_base import DiffusionModelBase

    registry, page = DiffusionModelBase.registry, said(monkeypatch, capsys, "models")
    assert all(f"\n{name} " in page for name in registry.builtin)
    edits = {name for name in registry.builtin if registry.find(name, registry.known_algorithms(name)[0]).needs_images}
    assert {row[0] for row in models.rows() if row[2] == "prompts with images"} == edits
    assert edits > {"QwenImageEditPlusPipeline", "FluxKontextPipeline", "WanImageToVideoPipeline"}


def test_models_are_listed_without_their_libraries():
    """Nobody who asks what there is waits for diffusers."""
    code = "import sys, verl_omni.cli.models as m; m.rows(); print(sorted({'torch', 'diffusers'} & sys.modules.keys()))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


def test_every_algorithm_has_a_recipe_here(monkeypatch, capsys):
    from verl_omni.algorithms.registry import get_algorithm
    from verl_omni.cli.recipes import shipped

    assert "flow_grpo " in said(monkeypatch, capsys, "algorithms")
    ours = [row for row in algorithms.rows() if get_algorithm(row[0]).description]
    assert len(ours) >= 8 and all(row[2] in shipped() for row in ours)
    assert {row[0]: row[2] for row in ours}["flow_grpo"] == "qwen_image_ocr"  # the plainest


def test_a_reward_says_what_is_missing(monkeypatch):
    rows = {row[0]: row for row in rewards.rows()}
    assert set(rows) >= {"ocr", "pickscore", "geneval", "vlm_judge"}
    assert rows["jpeg_compressibility"][1:3] == ("image", "ready")
    assert rows["vlm_judge"][2] == "set address, model" and rows["ocr"][1] == "image, ground_truth"
    monkeypatch.setitem(registry._PACKAGES, "ocr", "no_such_package")
    assert {row[0]: row for row in rewards.rows()}["ocr"][2] == "install no_such_package"


def test_weights_that_would_have_to_be_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert rewards.not_in_cache("pickscore")[0] == "yuvalkirstain/PickScore_v1"
    (tmp_path / "models--yuvalkirstain--PickScore_v1").mkdir()
    assert "yuvalkirstain/PickScore_v1" not in rewards.not_in_cache("pickscore")
    assert rewards.not_in_cache("motion") == []


def test_a_module_of_your_own_is_listed_too(monkeypatch, capsys, tmp_path):
    (tmp_path / "my_own_rewards.py").write_text(
        "from verl_omni.rewards import register_reward\n\n"
        '@register_reward("my_own_reward", reads=("prompt",))\ndef f(images, prompts):\n    """How I like it."""\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        page = said(monkeypatch, capsys, "rewards", "--external-lib", "my_own_rewards")
    finally:
        registry._REWARDS._entries.pop("my_own_reward", None)
    assert "my_own_reward           image, prompt" in page and "How I like it" in page


def test_an_algorithm_in_a_file_of_your_own_is_listed_too(monkeypatch, capsys, tmp_path):
    from verl_omni.algorithms.registry import _ALGORITHMS

    (tmp_path / "my_own_algorithm.py").write_text(
        "from verl_omni.algorithms import Algorithm, register_algorithm\n\n"
        'register_algorithm(Algorithm(name="my_own_algorithm"))\n'
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        page = said(monkeypatch, capsys, "algorithms", "--external-lib", str(tmp_path / "my_own_algorithm.py"))
    finally:
        _ALGORITHMS._entries.pop("my_own_algorithm", None)
    assert re.search(r"^my_own_algorithm +policy gradient +- +-$", page, re.MULTILINE) and "\ngdpo" not in page


def test_the_doctor_finds_this_machine_fit(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verl-omni doctor"])
    with pytest.raises(SystemExit) as ended:
        doctor.main()
    page = capsys.readouterr().out
    assert ended.value.code == 0 and "A run can start here." in page
    for what in ("Python", "torch", "ray", "GPU", "memory", "disk, here"):
        assert f"  {what} " in page


def test_the_doctor_says_what_to_type(monkeypatch, capsys):
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: {"torch": "1.0", "rapidocr": None}.get(name, real(name)))
    monkeypatch.setattr(sys, "argv", ["verl-omni doctor"])
    with pytest.raises(SystemExit) as ended:
        doctor.main()
    page = capsys.readouterr().out
    assert ended.value.code == 1 and "before these are mended: torch" in page
    assert "!!  torch" in page and "pip install 'torch>=2.11'" in page
    assert "-   rapidocr" in page and "pip install 'verl-omni[rewards]'" in page


@pytest.mark.parametrize(("version", "fit"), [("5.23.0", True), ("5.0.0", False)])
def test_the_doctor_only_notes_a_transformers_above_verls_bound(version, fit, monkeypatch, capsys):
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: version if name == "transformers" else real(name))
    monkeypatch.setattr(sys, "argv", ["verl-omni doctor"])
    with pytest.raises(SystemExit) as ended:
        doctor.main()
    page = capsys.readouterr().out
    assert ended.value.code == (0 if fit else 1)
    assert ("above what verl asks for" in page) == fit and ("!!  transformers" in page) != fit


def test_the_doctor_names_every_engine_and_tracker_that_can_be_added(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "installed", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["verl-omni doctor"])
    with pytest.raises(SystemExit):
        doctor.main()
    page = capsys.readouterr().out
    for name in ("vllm-omni", "veomni", "tensorboard", "wandb", "mlflow", "trackio", "rapidocr", "av"):
        assert f"-   {name} " in page and f"->  {doctor.OPTIONAL[name][1]}" in page


def test_pages_are_named_where_there_are_some(monkeypatch, capsys, tmp_path):
    assert str(Path(doctor.__file__).parents[2] / "docs/rewards.md") in said(monkeypatch, capsys, "rewards")
    monkeypatch.setattr("verl_omni.__file__", f"{tmp_path}/site-packages/verl_omni/__init__.py")
    assert "docs/algorithms.md in the sources of verl-omni" in said(monkeypatch, capsys, "algorithms")


def test_of_every_model_that_is_listed_there_is_a_miniature(monkeypatch, capsys, tmp_path):
    from verl_omni.testing.tiny_random import BUILDERS

    listed = {row[0]: row[1] for row in models.rows()}
    writers = {"AutoModelForCausalLM": "Qwen2ForCausalLM"}
    writers["AutoModelForImageTextToText"] = "Qwen2_5_VLForConditionalGeneration"
    assert listed.keys() - BUILDERS.keys() == {*writers, "GlmImageForConditionalGeneration"}
    assert listed["LTX2ImageToVideoPipeline"] == "LTX-2, an image to video with sound"
    assert listed["LTX2Pipeline"] == "LTX-2, text to video with sound"
    for name, made in writers.items():
        shown = said(monkeypatch, capsys, "tiny", name, f"{tmp_path}/{name}")
        assert f"check actor_rollout_ref.rewriter.path={tmp_path}/{name}" in shown
        assert json.loads((tmp_path / name / "config.json").read_text())["architectures"] == [made]
    with pytest.raises(SystemExit, match="is a part of a GlmImagePipeline"):
        said(monkeypatch, capsys, "tiny", "GlmImageForConditionalGeneration", f"{tmp_path}/other")


def test_a_miniature_by_class_and_of_a_folder(monkeypatch, capsys, tmp_path):
    shown = said(monkeypatch, capsys, "tiny", "StableDiffusion3Pipeline", f"{tmp_path}/a")
    assert f"{tmp_path}/a: a StableDiffusion3Pipeline" in shown
    said(monkeypatch, capsys, "tiny", f"{tmp_path}/a", f"{tmp_path}/b")
    assert json.loads((tmp_path / "b/model_index.json").read_text())["_class_name"] == "StableDiffusion3Pipeline"
    monkeypatch.setattr(sys, "argv", ["verl-omni tiny", "StableDiffusion3Pipeline", f"{tmp_path}/a"])
    with pytest.raises(SystemExit, match="is not empty: name a new folder"):
        tiny.main()
