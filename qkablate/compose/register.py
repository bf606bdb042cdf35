"""The schemas of configs, and the resolvers of conf/train.yaml, for Hydra."""

import functools
import textwrap
import time
import uuid
from pathlib import Path

from qkablate.config import KEYS, Config, SweepConfig, flatten
from qkablate.config.sweep import as_word

HELP_WIDTH = 80  # columns, as those of every verb's help


@functools.cache
def register() -> None:
    """Register the schemas, and the resolvers of conf/train.yaml."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store(name="schema", node=Config)
    ConfigStore.instance().store(name="sweep_schema", node=SweepConfig)

    def multirun_dir(out: str) -> str:
        name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{uuid.uuid4().hex[:8]}"  # cannot collide
        return str(Path(out).expanduser() / "multirun" / name)

    OmegaConf.register_new_resolver("multirun_dir", multirun_dir, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("keys", format_keys, replace=True)
    OmegaConf.register_new_resolver("groups", format_groups, replace=True)


def format_groups() -> str:
    """List the groups of a run with their options, for --help."""
    from hydra.core.global_hydra import GlobalHydra

    loader = GlobalHydra.instance().config_loader()
    options = {group: loader.get_group_options(group) for group in vars(Config())}
    lines = (f"{group}: {', '.join(names)}" for group, names in options.items() if names)
    return "\n".join(textwrap.fill(line, HELP_WIDTH, subsequent_indent="  ") for line in lines)


def format_keys() -> str:
    """Format the table of keys for --help: name, default and help."""
    lines = []
    for name, default in flatten(Config()).items():
        info = KEYS[name]
        used_by = f" (data={', '.join(info.used_by)})" if len(info.used_by) in range(1, 3) else ""
        text = f"{f'{name}={as_word(default)}':<35} {info.help}{used_by}"
        lines += textwrap.wrap(text, HELP_WIDTH, subsequent_indent=" " * 36)
    return "\n".join(lines)
