"""The README says what is there."""

import re
from pathlib import Path

from test_architectures import TABLE
from write_matrix import MARKS, all_cells, cells_of, matrix_table, pair_of

from verl_omni.report.document_tables import fill, models_table

ROOT = Path(__file__).parent.parent


def test_the_table_of_models_is_the_registry():
    text = (ROOT / "docs/models.md").read_text()
    fresh = fill(text, "MODELS", models_table())
    assert fresh == text, "run: python -m verl_omni.report.document_tables docs/models.md"


def test_it_stays_short():
    """Half of the 1,452 words that it once had: what else there is to say has a page in docs/."""
    assert len((ROOT / "README.md").read_text().split()) <= 1452 // 2


def test_every_algorithm_of_the_readme_is_registered():
    from verl_omni.algorithms.registry import get_algorithm

    section = (ROOT / "README.md").read_text().split("## Algorithms")[1].split("##")[0]
    names = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    assert len(names) >= 8
    for name in names:
        assert get_algorithm(name).name == name


def test_every_model_of_the_table_is_in_the_readme():
    section = (ROOT / "README.md").read_text().split("## Models")[1].split("##")[0]
    for row in models_table().splitlines()[2:]:
        architecture, model = row.strip("| ").split(" | ")[:2]
        missing = [word for word in model.split(",")[0].split() if word not in section]
        assert not missing, f"the README's list of models lacks {architecture} ({model})"


def test_the_seconds_of_a_sound_are_said_as_they_are():
    from verl_omni.config.rollout import DiffusionPipelineConfig
    from verl_omni.pipelines.builtin import BUILTIN
    from verl_omni.pipelines.model_base import DiffusionModelBase

    said = DiffusionPipelineConfig.__dataclass_fields__["audio_duration_s"].metadata
    for architecture in BUILTIN:
        adapter = DiffusionModelBase.registry.find(architecture, "flow_grpo")
        own = adapter.pipeline_defaults.get("audio_duration_s")
        assert own is None or f"{own:g} of" in str(said), architecture


def test_the_matrix_is_what_its_script_writes_where_all_pass():
    """The pairs themselves: tests/pipelines/test_matrix.py."""
    text = (ROOT / "docs/models.md").read_text()
    fresh = fill(text, "MATRIX", matrix_table(passed()))
    assert fresh == text, "run: python tests/pipelines/write_matrix.py docs/models.md --missing"


def passed() -> dict[tuple[str, str], str]:
    """All, but the gradient of an image's reward where there is no image."""
    no_images = ("Wan", "HunyuanVideo", "LTX2", "MiniMaxH3", "AceStep", "LongCatAudio")
    refused = {pair for pair in all_cells() if pair[0].startswith(no_images) and pair[1] == "draft"}
    return {pair: MARKS["skipped" if pair in refused else "passed"] for pair in all_cells()}


def test_what_the_page_has_is_not_run_again_and_what_failed_is():
    cells = passed()
    pairs = list(cells)
    page = "before\n<!-- MATRIX -->\n{}\n<!-- /MATRIX -->\nbehind"
    assert cells_of(page.format(matrix_table(cells))) == cells
    assert cells_of(page.format(matrix_table(cells | {pairs[3]: MARKS["failed"]}))).keys() == {*pairs} - {pairs[3]}
    without = "\n".join(line.rsplit("|", 2)[0] + "|" for line in matrix_table(cells).splitlines()[:-1])
    assert cells_of(page.format(without)).keys() == {p for p in pairs if p[0] != TABLE[-1].name and p[1] != "draft"}
    assert pair_of("tests/pipelines/test_matrix.py::test_a_step[WanPipeline-2.2-flow_grpo fast]") in cells


def test_the_table_of_parity_has_every_architecture_within_its_bounds():
    """Its figures are those of one machine; the bounds are those of tests/pipelines/test_architectures.py."""
    text = (ROOT / "docs/models.md").read_text().split("<!-- PARITY -->")[1].split("<!-- /PARITY -->")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (\S+) \| (\S+) \| (\S+) \|$", text, re.MULTILINE)
    assert [row[0] for row in rows] == [row.name for row in TABLE], "run: python tests/pipelines/write_parity.py"
    assert all(float(row[1]) < 1e-4 and float(row[2]) <= 5e-5 and float(row[3]) <= 1e-6 for row in rows)
