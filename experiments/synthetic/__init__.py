"""The 22 synthetic tasks of SLAY, as its authors define them and repaired."""

from experiments.synthetic.published import PUBLISHED_TASKS as PUBLISHED_TASKS
from experiments.synthetic.repaired import REPAIRED_TASKS as REPAIRED_TASKS
from experiments.synthetic.task import Examples as Examples
from experiments.synthetic.task import Task as Task
from experiments.synthetic.task import baselines as baselines

VARIANTS = {"published": PUBLISHED_TASKS, "repaired": REPAIRED_TASKS}
