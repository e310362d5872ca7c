"""Samples drawn by a server with its own copy of the model, to which weights are pushed, train the same model."""

from e2e_runs import LEARNING, Run, metrics, settings, user_folder


def test_a_rollout_server_changes_no_number(tmp_path, uninterrupted):
    folder = user_folder(tmp_path)
    Run(settings("run", *LEARNING, "actor_rollout_ref.hybrid_engine=false"), folder).succeed()
    assert metrics(folder / "run") == metrics(uninterrupted)
