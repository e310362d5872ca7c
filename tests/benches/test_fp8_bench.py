"""8 bits beside other ways: what is told of runs, and where another library is not there."""

import torch

from benchmarks import fp8


def run(*points):
    return {"points": [dict(zip(("step", "seconds", "score"), point, strict=True)) for point in points]}


def test_scores_stand_against_steps_and_against_seconds():
    """The second kind takes half as long: after 30 s it has done 6 steps, the first one 3."""
    found = {"in full": [run((0, 0.0, 0.4), (6, 60.0, 0.7))], "in 8 bits": [run((0, 0.0, 0.4), (6, 30.0, 0.7))]}
    assert fp8.by(found, "step", "after {:.0f} steps").splitlines() == [
        "| images of training | after 0 steps | after 2 steps | after 4 steps | after 6 steps | each seed at last |",
        "|---|---|---|---|---|---|",
        "| in full | 0.400 | 0.500 | 0.600 | 0.700 | 0.700 |",
        "| in 8 bits | 0.400 | 0.500 | 0.600 | 0.700 | 0.700 |",
    ]
    seconds = fp8.by(found, "seconds", "after {:.0f} s").splitlines()[2:]
    assert seconds == [
        "| in full | 0.400 | 0.450 | 0.500 | 0.550 | 0.550 |",
        "| in 8 bits | 0.400 | 0.500 | 0.600 | 0.700 | 0.700 |",
    ]


def test_a_compiled_layer_of_torchao_is_asked_too(monkeypatch):
    """Which has no length, so no truth of its own."""
    compiled = torch.compile(torch.nn.Linear(128, 256, dtype=torch.bfloat16), backend="eager")
    monkeypatch.setattr(fp8, "torchaos", lambda *given: compiled)
    assert fp8.check({"one": (64, 128, 256)}, "cpu")["one"]["torchao, compiled"] > 0


def test_where_torchao_cannot_compute_a_line_says_so(capsys):
    found = fp8.check({"one": (64, 128, 256)}, "cpu")
    assert "torchao" in capsys.readouterr().out.splitlines()[0]
    assert found["one"]["off emulation"] <= fp8.TOLERANCE and "torchao, compiled" not in found["one"]
    assert fp8.torchaos(torch.zeros(2, 2), torch.zeros(2), "cpu") is None
