from model_checks import cuda, triton  # noqa: F401
