"""What was written for the version before, from the addresses that it knew, still runs."""

import pyarrow as pa
import pyarrow.parquet as pq
from e2e_runs import metrics, prompts, settings

from verl_omni.testing.local_trainer import local_config, local_trainer


def test_a_loss_an_adapter_and_a_reward(tmp_path, process_group):
    rows = [row | {"data_source": "older_brightness"} for row in pq.read_table(prompts() / "train.parquet").to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    arguments = settings(
        tmp_path / "run",
        f"data.train_files={tmp_path}/train.parquet",
        "data.val_files=null",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.model.external_lib=older_package",
        "actor_rollout_ref.model.algorithm=older",
        "reward.scorers.older_brightness.wanted=0.25",
    )
    local_trainer(local_config(arguments)).fit()
    found = metrics(tmp_path / "run")[1]
    import older_package

    assert found["actor/doubled"] == 2 and found["actor/first_ratio_max_dev"] < 1e-6
    assert found["actor/grad_norm"] > 0 and 0 < found["critic/rewards/mean"] <= 1
    assert older_package.SEEN["pipelines"]
