"""The tour of the source: each stop is called, in the order of the page, and on the linked line."""

import sys
import threading

import pytest

import tour
from house import ROOT
from project import Project
from stage_data import REWARD
from surefoot.recipe import recipe as recipes
from surefoot.run.training_run import run

GRPO = {"reward": [f"{REWARD}:varied"], "group_size": 3, "max_new_tokens": 5, "beta": 0.1}


def test_every_stop_is_linked_to_its_line():
    text = tour.PAGE.read_text()
    assert text == tour.renewed(text), "run: make docs"


class Calls:
    """The calls of the functions that are ``stops``, in order."""

    def __init__(self, stops):
        self.stops, self.order = set(stops), []

    def called(self, frame, event, argument):
        code = frame.f_code
        stop = code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname
        if event == "call" and stop in self.stops:
            self.order.append(stop)


@pytest.mark.parametrize(
    ("titles", "settings"),
    [
        (
            ["A training batch, from file to update", "A checkpoint, from memory to disk"],
            {"checkpoint": {"save_steps": 1, "async_save": False}},
        ),
        pytest.param(
            ["A window of GRPO, from prompts to a loss"],
            {
                "stage": {"grpo": GRPO},
                "method": {"lora": {"rank": 2}},
                "data": {"datasets": ["sums"]},
            },
            marks=pytest.mark.proof,
        ),
    ],
)
def test_a_run_stops_where_the_tour_does(titles, settings, tmp_path):
    project = Project(tmp_path, train={"max_steps": 1}, **settings)
    journeys = [tour.journeys()[title] for title in titles]
    calls = Calls(stop for stops in journeys for stop in stops)
    threading.setprofile(calls.called)
    sys.setprofile(calls.called)
    try:
        run(recipes.load(project.recipe))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    for stops in journeys:
        assert 10 <= len(stops) <= 14
        later = iter(calls.order)
        assert [stop for stop in stops if stop not in later] == []  # `in` reads up to the stop
