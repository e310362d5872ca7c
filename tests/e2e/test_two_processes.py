"""Two processes learn what one does, and one validates what two have saved."""

import pytest
from e2e_runs import LEARNING, Run, metrics, settings, user_folder

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

VAL = "val-core/jpeg_compressibility/reward/mean@1"
COMPARED = {VAL, "critic/rewards/mean", "critic/advantages/max", "actor/grad_norm", "actor/kl_loss", "actor/lr"}


def test_the_number_of_processes_does_not_matter(uninterrupted, tmp_path):
    folder = user_folder(tmp_path)
    Run(settings("run", *LEARNING, "trainer.n_gpus_per_node=2"), folder).succeed()
    one, two = metrics(uninterrupted), metrics(folder / "run")
    assert list(one) == list(two)
    for step in one:
        assert one[step].keys() == two[step].keys()
        for name in COMPARED & one[step].keys():
            # Rounding moves a pixel by 1 of 255 here and there, and so a reward, and so all that follows.
            close = pytest.approx(one[step][name], rel=1e-3 if step <= 1 else 2e-2, abs=1e-6)
            assert two[step][name] == close, (step, name)

    output = Run(settings("run", *LEARNING, "trainer.val_only=true"), folder).succeed()
    assert "Validating run/global_step_3." in output
    again = metrics(folder / "run")
    assert list(again) == [0, 1, 2, 3], "validation adds to the metrics of its checkpoint and takes none away"
    assert again[3][VAL] == pytest.approx(two[3][VAL], abs=1e-4)
