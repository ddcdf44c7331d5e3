"""New runs: schema, checks as one types, edits by a form, plan, preview, start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from fastapi import APIRouter, Response

from ...recipe.files import read_text
from ..board import Board
from ..recipe_text import edit, schema
from ..reports import recipes as reports
from ..reports.recipes import EditBody, TextBody, TryBody
from ..run_folders import find_materials, inside
from . import Answer


def routes(board: Board) -> APIRouter:
    """The addresses of recipes."""
    router = APIRouter(prefix="/api")
    router.get("/schema")(_schema)
    router.get("/recipes")(_recipes(board))
    router.get("/recipe")(_recipe(board))
    router.get("/materials")(_materials(board))
    router.post("/demo")(_demo(board))
    router.post("/check")(_check(board))
    router.post("/edit")(_edit(board))
    router.post("/try")(_try(board))
    router.post("/start")(_start(board))
    return router


def _schema(response: Response) -> Answer:
    """The JSON schema of recipes, of which the form is made."""
    response.headers["Cache-Control"] = "private, max-age=3600"
    return schema()


def _recipes(board: Board) -> Callable[..., object]:
    def recipes() -> Answer:
        """The recipe files below ROOT that are not those of runs."""
        return {"files": reports.files(board)}

    return recipes


def _recipe(board: Board) -> Callable[..., object]:
    def recipe(file: str) -> Answer:
        """The text of a recipe file."""
        return {"file": file, "text": read_text(inside(board.root, file), follow=False)}

    return recipe


def _materials(board: Board) -> Callable[..., object]:
    def materials() -> Answer:
        """The models and files of rows below ROOT."""
        return asdict(find_materials(board.root))

    return materials


def _demo(board: Board) -> Callable[..., object]:
    def demo() -> Answer:
        """Train the bundled model on the bundled data, in a folder below ROOT."""
        return reports.demo(board)

    return demo


def _check(board: Board) -> Callable[..., object]:
    def checked(body: TextBody) -> Answer:
        """What is wrong with a text, and its data."""
        return reports.checked(board, body.text, body.file)

    return checked


def _edit(board: Board) -> Callable[..., object]:
    def edited(body: EditBody) -> Answer:
        """The text with one setting changed, and what is wrong with it now."""
        text = edit(body.text, body.keys, body.value)
        return {"text": text, **reports.checked(board, text, body.file)}

    return edited


def _try(board: Board) -> Callable[..., object]:
    async def tried(body: TryBody) -> Answer:
        """Start a command that reads the text, which may not be saved yet."""
        return reports.attempt(board, body).as_data()

    return tried


def _start(board: Board) -> Callable[..., object]:
    def start(body: TextBody) -> Answer:
        """Write the recipe to its file, and train it in a process of its own."""
        return reports.start(board, body)

    return start
