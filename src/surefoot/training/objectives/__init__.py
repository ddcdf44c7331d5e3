"""The mathematics of the stages: pure functions, each with its source."""
