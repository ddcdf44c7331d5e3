"""Rewards of sampled responses. To add a rule: write its dataclass and its function, add its
line."""

from collections.abc import Mapping

from .kinds import ExactMatch, FunctionReward, JSONSchema, Length, Regex, RewardModel, Server

REWARDS: Mapping[str, type] = {
    "function": FunctionReward,
    "exact_match": ExactMatch,
    "regex": Regex,
    "json_schema": JSONSchema,
    "length": Length,
    "reward_model": RewardModel,
    "server": Server,
}
OF_TEXT = ("function", "path")  # what a text such as rewards.py:f is
