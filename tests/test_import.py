import subprocess
import sys

HEAVY = ("torch", "ray", "verl", "diffusers", "transformers", "vllm", "hydra")


def test_import_loads_nothing_heavy_and_writes_nothing(tmp_path):
    code = f"import sys, verl_omni; print(*[m for m in {HEAVY} if m in sys.modules]); print(verl_omni.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    loaded, version = done.stdout.splitlines()
    assert loaded == "", f"import verl_omni loads {loaded}"
    assert version[0].isdigit()
    assert list(tmp_path.iterdir()) == []


def test_what_watches_a_run_has_imported_nothing_heavy():
    """Nobody has a line for a Ctrl-C before it watches: each import is time in which that is a traceback."""
    code = (
        "import runpy, sys; from verl_omni.cli import supervisor\n"
        f"supervisor.watch = lambda: sys.exit(' '.join(m for m in {HEAVY + ('omegaconf',)} if m in sys.modules))\n"
        "runpy.run_module('verl_omni.trainer.main_diffusion', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "\n", done.stderr
