"""Rollout engines are found by their folders, without importing one."""

import subprocess
import sys

import pytest

from verl_omni.workers import rollout
from verl_omni.workers.rollout import built_in, engine_class, engines, forks, register_rollout, server_class

NEW = '''from verl_omni.workers.rollout import Listed

ENGINES = {"new": Listed(f"{__name__}.engine.New", f"{__name__}.engine.Server")}
'''


@pytest.fixture
def another_folder(tmp_path, monkeypatch):
    package = tmp_path / "new_rollout"
    package.mkdir()
    (package / "__init__.py").write_text(NEW)
    (package / "engine.py").write_text("class New: ...\n\n\nclass Server: ...\n")
    monkeypatch.setattr(rollout, "__path__", [*rollout.__path__, str(tmp_path)])
    built_in.cache_clear()
    yield
    built_in.cache_clear()
    for name in [name for name in sys.modules if "new_rollout" in name]:
        del sys.modules[name]
    vars(rollout).pop("new_rollout", None)


def test_a_folder_is_all_that_a_new_engine_needs(another_folder):
    assert "new" in engines() and not forks("new")
    assert f"{rollout.__name__}.new_rollout.engine" not in sys.modules
    assert (engine_class("new").__name__, server_class("new").__name__) == ("New", "Server")
    with pytest.raises(ValueError, match='rollout engine "new" is built in'):
        register_rollout("new", server=object)


def test_to_list_them_imports_none():
    code = (
        "import sys; from verl_omni.workers.rollout import engines; print(engines()); "
        "print([m for m in ('torch', 'verl', 'ray', 'vllm', 'diffusers', 'omegaconf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['diffusers', 'vllm_omni']", "[]"]
