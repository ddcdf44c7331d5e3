"""One test that checks many files. A test of its own for each would take longer to start than to
run: thousands of them were a tenth of the whole suite.

And of many cases, those that ``make test`` runs."""

import pytest


def each(items, name):
    """Make a check of one item a test of all ``items``, which names every one that fails."""

    def test_of(check):
        def test():
            wrong = []
            for item in items:
                try:
                    check(item)
                except AssertionError as error:
                    wrong.append(f"{name(item)}: {error}")
            assert not wrong, "\n".join(wrong)

        test.__name__ = check.__name__
        return test

    return test_of


def some(cases, few):
    """All cases, of which ``make test`` runs few and ``make proof`` the others."""
    assert (left := [case for case in few if case not in cases]) == [], left
    return [
        case
        if case in few
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.proof)
        for case in cases
    ]
