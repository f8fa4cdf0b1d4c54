from tasks import ns  # noqa: F401
