"""Torch's AdamW without its slow imports."""

import inspect

import torch


class AdamW(torch.optim.AdamW):
    """torch's AdamW without the wrappers that keep torch.compile out of its methods.

    They import the compiler, which takes a second, and no optimizer is compiled here.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
