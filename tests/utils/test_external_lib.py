import pytest

from verl_omni.utils.external_lib import import_external_lib


@pytest.mark.parametrize(
    ("source", "said"),
    [("def f(:\n", "SyntaxError: invalid syntax"), ("1 / 0\n", "ZeroDivisionError: division by zero")],
)
def test_a_module_that_cannot_be_imported_is_named(source, said, tmp_path, monkeypatch):
    (tmp_path / "mine_with_a_mistake.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f'external_lib="mine_with_a_mistake" cannot be imported: {said}'):
        import_external_lib("mine_with_a_mistake")
