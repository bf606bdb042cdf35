"""Generated tasks that separate the variants.

A new task is a class here, its keys in the schema and a YAML in conf/data.
"""

from qkablate.data.tasks.addition import Add
from qkablate.data.tasks.base import Task
from qkablate.data.tasks.commands import Commands
from qkablate.data.tasks.copying import Copy, Reverse, Sort
from qkablate.data.tasks.directed import Directed
from qkablate.data.tasks.dyck import Dyck
from qkablate.data.tasks.induction import Induction
from qkablate.data.tasks.recall import Recall

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (Recall, Induction, Copy, Reverse, Sort, Directed, Dyck, Add, Commands)
}

PAIR_TASKS = tuple(name for name, task in TASKS.items() if task.has_pairs)

__all__ = ["PAIR_TASKS", "TASKS", "Task"]
