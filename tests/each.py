"""One test that checks many files. A test of its own for each would take longer to start than to
run: thousands of them were a tenth of the whole suite."""


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
