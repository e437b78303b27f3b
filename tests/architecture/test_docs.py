"""The documentation names what there is."""

from architecture.modules import PAGE, page


def test_architecture_page_lists_every_module() -> None:
    assert PAGE.read_text() == page(), "run: python tests/architecture/modules.py"
