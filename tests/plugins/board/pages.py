"""What every page is looked at for."""

from importlib.util import find_spec
from pathlib import Path

AXE = find_spec("axe_core_python")


def show(page, server, hash_, *, theme="light", language="en"):
    page.run(
        "localStorage.theme = arguments[0]; localStorage.language = arguments[1]", theme, language
    )
    page.open("about:blank")
    page.open(server.address + hash_)
    page.wait("return document.querySelector('#main h1')")


def click(page, x, y):
    """With the mouse, as a chart is clicked."""
    button = {"button": "left", "clickCount": 1}
    for kind, more in (("mouseMoved", {}), ("mousePressed", button), ("mouseReleased", button)):
        page.cdp("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)


def violations(page):
    """What axe finds wrong for people who read by ear, by keyboard or by contrast."""
    if not AXE:
        return []
    page.run((Path(AXE.origin).parent / "axe.min.js").read_text())
    return page.run(
        "return axe.run(document, {resultTypes: ['violations']}).then(found =>"
        " found.violations.map(one => [one.id, ...one.nodes.slice(0, 3).map(n => n.html)]))"
    )


def check_on_a_phone(page, server, hash_):
    page.open(f"{server.address}static/icon.svg")
    page.size(390, 844, phone=True)
    show(page, server, hash_, theme="dark", language="zh")
    page.wait_for("运行")
    assert page.run("return document.documentElement.scrollWidth") == 390
    assert page.run("return document.documentElement.lang") == "zh"
    unnamed = page.run(
        "return [...document.querySelectorAll('button,a[href],input,select,textarea')].filter(e =>"
        " e.offsetParent && !(e.innerText.trim() || e.ariaLabel || e.labels?.length)"
        ").map(e => e.outerHTML)"
    )
    assert not unnamed
    for theme in ("dark", "light"):
        page.run("document.documentElement.dataset.theme = arguments[0]", theme)
        assert violations(page) == [], theme
    assert not [one for one in page.errors() if "favicon" not in one]
