"""A board and a browser, for the modules with a ``root``."""

from types import SimpleNamespace

import pytest

from surefoot.plugins.board.app import create_app

from . import browser
from .serving import served


@pytest.fixture(scope="module")
def server(root):
    with served(create_app(root)) as port:
        yield SimpleNamespace(address=f"http://127.0.0.1:{port}/", port=port)


@pytest.fixture(scope="session")
def window():
    found = browser.Browser()
    yield found
    found.close()


@pytest.fixture(scope="module")
def page(server, window):
    """The browser's one page, at an address of the board."""
    window.size(1280, 900)
    window.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)  # else over a curve
    window.open(f"{server.address}static/icon.svg")
    window.errors()
    yield window
    window.open("about:blank")  # a page that is still shown would ask on
