import sys

import pytest

from verl_omni.trainer.failures import users_mistake
from verl_omni.utils.external_lib import import_external_lib, module_name, with_registered
from verl_omni.utils.registry import registrations


@pytest.mark.parametrize(
    ("source", "said"),
    [("def f(:\n", "SyntaxError: invalid syntax"), ("1 / 0\n", "ZeroDivisionError: division by zero")],
)
def test_a_module_that_cannot_be_imported_is_named(source, said, tmp_path, monkeypatch):
    (tmp_path / "mine_with_a_mistake.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f'external_lib="mine_with_a_mistake" cannot be imported: {said}'):
        import_external_lib("mine_with_a_mistake")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("mine_in_a_file", "json_of_mine"):
        sys.modules.pop(name, None)


def test_a_file_needs_no_pythonpath(here):
    (here / "code").mkdir()
    (here / "code/mine_in_a_file.py").write_text("import json_of_mine\n")
    (here / "code/json_of_mine.py").write_text("")  # a neighbour, as a script would find it
    import_external_lib("code/mine_in_a_file.py")
    assert "json_of_mine" in sys.modules and module_name("code/mine_in_a_file.py") in sys.modules


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("not_there.py", 'external_lib="not_there.py": there is no such file in /.*: name its path'),
        ("my-algorithm.py", 'a module cannot be called "my-algorithm": rename the file'),
        ("time.py", r"another module has that name \(a part of Python\): rename the file"),
        ("json.py", r"another module has that name \(.*json/__init__.py\): rename the file"),
    ],
)
def test_a_file_that_cannot_be_a_module(here, name, said):
    if name != "not_there.py":
        (here / name).write_text("")
    with pytest.raises(ValueError, match=said):
        import_external_lib(name)


@pytest.mark.parametrize("name", ["code/mine_in_a_file.py", "json_of_mine", "code/mine_in_a_file.py, time"])
def test_an_import_of_its_own_that_is_missing_is_named_with_its_file(here, name, monkeypatch):
    (here / "code").mkdir()
    for file in ("code/mine_in_a_file.py", "json_of_mine.py"):
        (here / file).write_text("\nimport no_dep.part\n")
    monkeypatch.syspath_prepend(here)
    first = name.split(",")[0]
    with pytest.raises(ModuleNotFoundError) as caught:
        import_external_lib(name)
    file = here / first if first.endswith(".py") else here / f"{first}.py"
    assert users_mistake(caught.value) == (
        f'actor_rollout_ref.model.external_lib="{first}" cannot be imported: {file}, line 2, wants the module '
        '"no_dep", which is not installed, or not on PYTHONPATH'
    )


def test_the_file_that_is_here_is_named(here):
    (here / "mine_in_a_file.py").write_text("")
    with pytest.raises(ModuleNotFoundError, match=r"on PYTHONPATH\? Or name the file .*external_lib=mine_in_a_file.py"):
        import_external_lib("mine_in_a_file")


def test_a_file_is_not_listed_twice(here, monkeypatch):
    (here / "mine_in_a_file.py").write_text("")
    import_external_lib("mine_in_a_file.py")
    for other in list(registrations):  # of other tests in this process
        monkeypatch.delitem(registrations, other)
    monkeypatch.setitem(registrations, "mine_in_a_file", "something")
    listed = with_registered("mine_in_a_file.py")
    assert "mine_in_a_file" not in (listed if isinstance(listed, list) else [listed])
    # A later run of this process that does not name it: its workers cannot find it by its name alone.
    assert with_registered(None) == [str(here / "mine_in_a_file.py")]
