"""A board and a browser, for the modules with a ``root``."""

import pytest

from board import browser
from board.serving import Server


@pytest.fixture(scope="module")
def server(root):
    found = Server(root)
    yield found
    found.close()


@pytest.fixture(scope="module")
def page(server):
    found = browser.Browser()
    found.open(f"{server.address}static/icon.svg")
    yield found
    found.close()
