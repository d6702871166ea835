"""Attention on more than one process or machine, with `torch.distributed`: applied from outside to what is there."""

__all__: list[str] = []
