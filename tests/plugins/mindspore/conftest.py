from .real import copied, real, truth  # noqa: F401 - fixtures
