import torch as torch

ENVIRONMENT: dict[str, str]

def prepare() -> None: ...
